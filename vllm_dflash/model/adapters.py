"""The target's embedding and head without LoRA: a drafter has no adapters.

vLLM wraps both where LoRA is on, and the wrappers go by the rows of the target's last batch, which
are not those of a block.
"""

from __future__ import annotations

from contextlib import ContextDecorator
from typing import Any

from torch import nn
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding


class Unadapted(ContextDecorator):
    """What is called inside `with` this, or decorated by it, goes through the wrapped layers."""

    def __init__(self, target: Any) -> None:
        self._wrapped: list[tuple[dict[str, nn.Module | None], str, nn.Module, nn.Module]] = []
        """Where each wrapper stands, by what name, and what it wraps."""
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
