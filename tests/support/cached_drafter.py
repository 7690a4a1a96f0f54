"""One drafter on a real paged cache, without an engine around it: what both runners share."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.worker.cpu import shm  # noqa: F401 - puts CPU versions of V2's buffers in place
from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

from support.pairs import Pair
from vllm_dflash.config.engine_options import EngineOptions
from vllm_dflash.engine.vllm_fixes.gathered_ids import fix_gathered_ids

CACHE_BLOCK = 32


class HfTarget(nn.Module):
    """The parts of a target that a drafter needs, from a Hugging Face model."""

    def __init__(self, target: PreTrainedModel, *, has_tensors: bool) -> None:
        """Set up; with `has_tensors`, also its tensors as vLLM keeps them, for candidates."""
        super().__init__()
        self.embed_input_ids = target.get_input_embeddings()
        self.compute_logits = target.get_output_embeddings()
        if not has_tensors:
            return
        shape = self.embed_input_ids.weight.shape
        self.embed_tokens, self.lm_head = VocabParallelEmbedding(*shape), ParallelLMHead(*shape)
        for mine, of_target in (
            (self.embed_tokens, self.embed_input_ids),
            (self.lm_head, self.compute_logits),
        ):
            mine.weight_loader(mine.weight, of_target.weight.data)
        self.lm_head.quant_method.process_weights_after_loading(self.lm_head)

    def forward(self, taps: torch.Tensor) -> tuple[None, list[torch.Tensor]]:
        """Return what the target's layers have made, as a step's last call on Model Runner V2."""
        return None, [taps]


@dataclass
class Row:
    """One request's part of a step."""

    request: int
    features: torch.Tensor  # [T, m * H], of the rows scheduled this step
    bonus: int = 5
    num_rejected: int = 0
    in_prompt: bool = False
    has_embeddings: bool = False
    """Its prompt was given as embeddings: the runner has no tokens for it."""


class Harness:
    """Drives a drafter step by step over requests with their own caches."""

    proposer: Any

    def __init__(
        self,
        pair: Pair,
        *,
        max_model_len: int = 256,
        max_requests: int = 8,
        dtype: str = "float32",
        rank: int = 0,
        num_ranks: int = 1,
        rendezvous: str | None = None,
        **speculative: Any,
    ) -> None:
        """Set up one rank. Several ranks meet at a file and take the same steps, a process each."""
        _set_torch_accelerator_to_noop()
        self.config = pair.start(
            speculative,
            dtype=dtype,
            enforce_eager=True,
            max_model_len=max_model_len,
            max_num_seqs=max_requests,
            tensor_parallel_size=num_ranks,
        )
        self.max_model_len = max_model_len
        unlike = np.arange(1000, 1000 + max_requests * max_model_len, dtype=np.int32)
        self.texts = unlike.reshape(max_requests, max_model_len)
        """Tokens by request and position: no two are alike, unless a test says so."""
        self.width = EngineOptions.from_config(self.config).draft_width
        self.max_tokens, self.min_tokens = 10_000, 0
        self.blocks_each = max_model_len // CACHE_BLOCK + 1
        num_blocks = 1 + max_requests * self.blocks_each
        with set_current_vllm_config(self.config):
            if not torch.distributed.is_initialized():
                init = f"file://{rendezvous or tempfile.mkdtemp() + '/init'}"
                init_distributed_environment(num_ranks, rank, init, rank, "gloo")
                ensure_model_parallel_initialized(num_ranks, 1)
                fix_gathered_ids()  # as workers do
            target = HfTarget(pair.load_target(), has_tensors=pair.spec.num_candidates is not None)
            self._load(target.to(self.config.model_config.dtype))
            layers = {a.attn.layer_name: a.attn for a in self.proposer.model.context.attentions}
            for layer in layers.values():
                spec = layer.get_kv_cache_spec(self.config)
                shape = (num_blocks, spec.num_kv_heads, CACHE_BLOCK, 2 * spec.head_size)
                layer.kv_cache = torch.full(shape, float("nan"), dtype=spec.dtype)
            self.caches = [layer.kv_cache for layer in layers.values()]
            self.config.cache_config.block_size = CACHE_BLOCK
            spec = next(iter(layers.values())).get_kv_cache_spec(self.config)
            group = KVCacheGroupSpec(list(layers), spec)
            self._initialize_attention(KVCacheConfig(num_blocks, [], [group]))
            # In an engine the runner's own metadata builders do this for every layer.
            isa = next(layer.isa for layer in layers.values() if hasattr(layer, "isa"))
            for layer in layers.values():
                layer.isa = isa
        order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(0)) + 1
        self.blocks = order.view(max_requests, self.blocks_each).int()
        self.lengths = [0] * max_requests
        self.logits: torch.Tensor | None = None
        self.candidates: torch.Tensor | None = None
        """Columns of the logits, if they are those of candidates."""
        model = self.proposer.model
        self.gives_log_probs = model.vocabulary.gives_log_probs
        self.spies = model.compute_logits, model.compute_candidates
        model.compute_logits, model.compute_candidates = self._record, self._record_candidates

    def nan_drafts(self) -> int:
        """Return how many drafts were not finite, in all steps (V1) or the last one (V2)."""
        raise NotImplementedError

    def _load(self, target: HfTarget) -> None:
        raise NotImplementedError

    def _initialize_attention(self, cache: KVCacheConfig) -> None:
        raise NotImplementedError

    def _propose(self, rows: list[Row], starts: list[int], wanted: int | None) -> list[list[int]]:
        raise NotImplementedError

    def _record(self, hidden: torch.Tensor) -> torch.Tensor:
        self.hidden = hidden
        self.logits = self.spies[0](hidden)
        return self.logits

    def _record_candidates(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.hidden = hidden
        self.candidates, self.logits = self.spies[1](hidden)
        return self.candidates, self.logits

    def allocate(self, request: int, num_tokens: int) -> None:
        """Put zeros into the unused places of a request's blocks, as an unused cache has them."""
        used = self.blocks[request, : -(-num_tokens // CACHE_BLOCK)].long()
        for cache in self.caches:
            cache[used] = torch.nan_to_num(cache[used], nan=0.0)

    def step(self, rows: list[Row], num_speculative_tokens: int | None = None) -> list[list[int]]:
        """Call `propose` once. Rejected rows are the last of their request.

        `num_speculative_tokens`: how wide blocks may be in this step.
        """
        starts = [self.lengths[row.request] for row in rows]
        for row, start in zip(rows, starts, strict=True):
            end = start + len(row.features) + self.width + 1
            self.allocate(row.request, end)
        self.logits = None
        with set_current_vllm_config(self.config):
            drafts = self._propose(rows, starts, num_speculative_tokens)
        for row in rows:
            self.lengths[row.request] += len(row.features) - row.num_rejected
        return drafts


def positions_of(rows: list[Row], starts: list[int]) -> torch.Tensor:
    return torch.cat(
        [torch.arange(s, s + len(row.features)) for row, s in zip(rows, starts, strict=True)]
    )


def query_starts(rows: list[Row]) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum([len(row.features) for row in rows])], dtype=torch.int32)


def features_of(pair: Pair, num_rows: int, seed: int) -> torch.Tensor:
    """Return random features [num_rows, m * H] for a pair's drafter."""
    width = len(pair.spec.taps) * pair.spec.target_hidden_size
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed))


def check_logits(ours: torch.Tensor | None, expected: torch.Tensor) -> None:
    """Check that errors are within 1e-4 of the largest value."""
    assert ours is not None
    assert torch.isfinite(ours).all()
    assert (ours - expected).abs().max() <= 1e-4 * expected.abs().max()
