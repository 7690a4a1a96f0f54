"""The target's embedding and head without LoRA, because a drafter has no adapters.

With LoRA on, vLLM wraps both. The wrappers assume the rows of the target's last batch, which are
not the rows of a block.
"""

from __future__ import annotations

from contextlib import ContextDecorator
from typing import Any

from torch import nn
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding


class WithoutLoRA(ContextDecorator):
    """Context manager and decorator that replaces LoRA wrappers by the layers they wrap."""

    def __init__(self, target: Any) -> None:
        self._wrapped: list[tuple[dict[str, nn.Module | None], str, nn.Module, nn.Module]] = []
        """For each wrapper: its parent's modules, its name there, itself, and what it wraps."""
        parents = target.modules() if isinstance(target, nn.Module) else ()
        for parent in parents:
            for name, layer in parent.named_children():
                if isinstance(layer, BaseLayerWithLoRA) and isinstance(
                    layer.base_layer, VocabParallelEmbedding | LogitsProcessor
                ):
                    self._wrapped.append((parent._modules, name, layer, layer.base_layer))

    def __enter__(self) -> None:
        for modules, name, _, base in self._wrapped:
            modules[name] = base

    def __exit__(self, *error: object) -> None:
        for modules, name, wrapper, _ in self._wrapped:
            modules[name] = wrapper
