"""Our proposer and drafter on a real paged cache, without an engine around them."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from pairs import Pair
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

from vllm_dflash.runner.v1 import DFlashProposer

CACHE_BLOCK = 32


class HfTarget(nn.Module):
    """What a drafter needs of its target, from a Hugging Face model."""

    def __init__(self, target: nn.Module) -> None:
        super().__init__()
        self.embed_input_ids = target.get_input_embeddings()
        self.compute_logits = target.get_output_embeddings()


@dataclass
class Row:
    """One request's part of a step."""

    request: int
    features: torch.Tensor  # [T, m * H], of the rows scheduled this step
    bonus: int = 5
    num_rejected: int = 0
    in_prompt: bool = False


class DrafterHarness:
    """Drives `DFlashProposer.propose` step by step over requests with caches of their own."""

    def __init__(self, pair: Pair, *, max_model_len: int = 256, max_requests: int = 8) -> None:
        args = EngineArgs(
            model=str(pair.target),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=max_model_len,
            max_num_seqs=max_requests,
            speculative_config={"method": "dflash", "model": str(pair.drafter)},
        )
        _set_torch_accelerator_to_noop()
        self.config = args.create_engine_config()
        self.max_tokens = 10_000
        with set_current_vllm_config(self.config):
            if not torch.distributed.is_initialized():
                init = f"file://{tempfile.mkdtemp()}/init"
                init_distributed_environment(1, 0, init, 0, "gloo")
                ensure_model_parallel_initialized(1, 1)
            self.proposer = DFlashProposer(self.config, torch.device("cpu"), self)
            self.proposer.load_model(HfTarget(pair.load_target()))
            layers = {a.attn.layer_name: a.attn for a in self.proposer.model.context.attentions}
            blocks_each = max_model_len // CACHE_BLOCK + 1
            num_blocks = 1 + max_requests * blocks_each
            for layer in layers.values():
                spec = layer.get_kv_cache_spec(self.config)
                shape = (num_blocks, spec.num_kv_heads, CACHE_BLOCK, 2 * spec.head_size)
                layer.kv_cache = torch.full(shape, float("nan"))
            self.caches = [layer.kv_cache for layer in layers.values()]
            self.config.cache_config.block_size = CACHE_BLOCK
            spec = next(iter(layers.values())).get_kv_cache_spec(self.config)
            group = KVCacheGroupSpec(list(layers), spec)
            self.proposer.initialize_attn_backend(
                KVCacheConfig(num_blocks, [], [group]), [CACHE_BLOCK]
            )
            # In an engine the runner's own metadata builders do this for every layer.
            isa = next(layer.isa for layer in layers.values() if hasattr(layer, "isa"))
            for layer in layers.values():
                layer.isa = isa
        order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(0)) + 1
        self.blocks = order.view(max_requests, blocks_each).int()
        self.lengths = [0] * max_requests
        self.logits: torch.Tensor | None = None
        self.spy = self.proposer.model.compute_logits
        self.proposer.model.compute_logits = self._record

    def _record(self, hidden: torch.Tensor) -> torch.Tensor:
        self.hidden = hidden
        self.logits = self.spy(hidden)
        return self.logits

    def allocate(self, request: int, num_tokens: int) -> None:
        """Make the blocks a request uses what an unused cache holds: zeros."""
        used = self.blocks[request, : -(-num_tokens // CACHE_BLOCK)].long()
        for cache in self.caches:
            cache[used] = torch.nan_to_num(cache[used], nan=0.0)

    def step(self, rows: list[Row], num_speculative_tokens: int | None = None) -> list[list[int]]:
        """One call of `propose`. Rejected rows are the last of their request."""
        counts = [len(row.features) for row in rows]
        starts = [self.lengths[row.request] for row in rows]
        query_start_loc = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
        positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
        block_table = torch.stack([self.blocks[row.request] for row in rows])
        owners = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(counts))
        slots = block_table[owners, positions // CACHE_BLOCK].long() * CACHE_BLOCK
        slots += positions % CACHE_BLOCK
        seq_lens = torch.tensor(
            [s + n for s, n in zip(starts, counts, strict=True)], dtype=torch.int32
        )
        for row, seq_len in zip(rows, seq_lens.tolist(), strict=True):
            self.allocate(row.request, seq_len + self.proposer.num_speculative_tokens + 1)
        # What the proposer reads of its runner.
        self.discard_request_mask = SimpleNamespace(np=np.array([row.in_prompt for row in rows]))
        self.input_batch = SimpleNamespace(req_ids=[str(row.request) for row in rows])
        request = SimpleNamespace(
            num_prompt_tokens=0, sampling_params=SimpleNamespace(max_tokens=self.max_tokens)
        )
        self.requests = {str(row.request): request for row in rows}
        rejected = torch.tensor([row.num_rejected for row in rows], dtype=torch.int32)
        self.logits = None
        with set_current_vllm_config(self.config):
            drafts = self.proposer.propose(
                num_speculative_tokens=(
                    self.proposer.num_speculative_tokens
                    if num_speculative_tokens is None
                    else num_speculative_tokens
                ),
                target_token_ids=torch.zeros(len(positions), dtype=torch.int32),
                target_positions=positions,
                target_hidden_states=torch.cat([row.features for row in rows]),
                next_token_ids=torch.tensor([row.bonus for row in rows], dtype=torch.int32),
                token_indices_to_sample=None,
                common_attn_metadata=CommonAttentionMetadata(
                    query_start_loc=query_start_loc,
                    query_start_loc_cpu=query_start_loc,
                    seq_lens=seq_lens,
                    seq_lens_cpu_upper_bound=seq_lens,
                    num_reqs=len(rows),
                    num_actual_tokens=len(positions),
                    max_query_len=max(counts),
                    max_seq_len=int(seq_lens.max()),
                    block_table_tensor=block_table,
                    slot_mapping=slots,
                ),
                sampling_metadata=None,
                num_rejected_tokens_gpu=rejected if rejected.any() else None,
            )
        for row, count in zip(rows, counts, strict=True):
            self.lengths[row.request] += count - row.num_rejected
        return drafts
