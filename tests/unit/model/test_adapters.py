"""A drafter bypasses LoRA's wrappers."""

from __future__ import annotations

from contextlib import suppress

from torch import nn
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from vllm_dflash.model.adapters import WithoutLoRA


class Wrapper(BaseLayerWithLoRA):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer = base


def bare(kind: type[nn.Module]) -> nn.Module:
    """Return a layer of this type without any fields."""
    layer = kind.__new__(kind)
    nn.Module.__init__(layer)
    return layer


class Target(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.embed_tokens = Wrapper(bare(VocabParallelEmbedding))
        self.inner.proj = Wrapper(nn.Linear(2, 2))
        self.logits_processor = Wrapper(bare(LogitsProcessor))
        self.norm = nn.LayerNorm(2)


def test_embedding_and_head_are_the_targets_own_while_a_block_is_drafted() -> None:
    target = Target()
    before = dict(target.named_modules(remove_duplicate=False))
    with suppress(RuntimeError), WithoutLoRA(target):
        assert type(target.inner.embed_tokens) is VocabParallelEmbedding
        assert type(target.logits_processor) is LogitsProcessor
        assert target.inner.proj is before["inner.proj"]
        raise RuntimeError  # adapters are back after an error, too
    assert target.inner.embed_tokens is before["inner.embed_tokens"]
    assert target.logits_processor is before["logits_processor"]
