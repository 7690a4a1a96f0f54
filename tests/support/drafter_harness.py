"""Our drafting code on a real paged cache, without an engine around it, on either model runner."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.worker.cpu import shm  # noqa: F401 - puts CPU versions of V2's buffers in place
from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop
from vllm.v1.worker.gpu.block_table import BlockTables

from support.engines import USES_V2
from support.pairs import Pair
from vllm_dflash.config.draft_config import drafted_length
from vllm_dflash.config.engine_options import EngineOptions
from vllm_dflash.engine.block_layout import draft_limits
from vllm_dflash.engine.v1.proposer import PlannedProposer
from vllm_dflash.engine.v2 import speculator
from vllm_dflash.engine.v2.draft_slots import NUM_RECORD_FIELDS
from vllm_dflash.engine.v2.exchange import StepPlan
from vllm_dflash.engine.v2.speculator import PlannedSpeculator
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
        self.max_tokens = 10_000
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


class ProposerHarness(Harness):
    """The harness for the V1 runner."""

    def nan_drafts(self) -> int:
        return int(self.proposer.statistics.nan_drafts)

    def _load(self, target: HfTarget) -> None:
        self.proposer = PlannedProposer(self.config, torch.device("cpu"), self)
        self.proposer.load_model(target)

    def _initialize_attention(self, cache: KVCacheConfig) -> None:
        self.proposer.initialize_attn_backend(cache, [CACHE_BLOCK])

    def _propose(self, rows: list[Row], starts: list[int], wanted: int | None) -> list[list[int]]:
        counts = [len(row.features) for row in rows]
        query_start_loc = query_starts(rows)
        positions = positions_of(rows, starts)
        block_table = torch.stack([self.blocks[row.request] for row in rows])
        owners = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(counts))
        slots = block_table[owners, positions // CACHE_BLOCK].long() * CACHE_BLOCK
        slots += positions % CACHE_BLOCK
        seq_lens = torch.tensor(
            [s + n for s, n in zip(starts, counts, strict=True)], dtype=torch.int32
        )
        # The parts of its runner that the proposer reads.
        self.discard_request_mask = SimpleNamespace(np=np.array([row.in_prompt for row in rows]))
        texts_end = seq_lens.numpy() - [row.num_rejected for row in rows]
        self.input_batch = SimpleNamespace(
            req_ids=[str(row.request) for row in rows],
            vocab_size=1 << 20,
            req_prompt_embeds={n: None for n, row in enumerate(rows) if row.has_embeddings},
            token_ids_cpu=self.texts[[row.request for row in rows]],
            num_tokens_no_spec=texts_end.astype(np.int32),
        )
        request = SimpleNamespace(
            num_prompt_tokens=0, sampling_params=SimpleNamespace(max_tokens=self.max_tokens)
        )
        self.requests = {str(row.request): request for row in reversed(rows)}
        sampled = torch.tensor([[row.bonus] for row in rows])
        mask = torch.from_numpy(self.discard_request_mask.np)
        proposer = self.proposer
        _, counts = proposer.prepare_next_token_ids_padded(sampled, {}, self.input_batch, mask)
        verified = [row.num_rejected for row in rows]  # none of them was accepted
        rejected = None
        if any(verified):
            told = SimpleNamespace(num_draft_tokens=verified)
            *_, rejected = proposer.prepare_inputs_padded(None, told, counts)
        # vLLM asks for the same number in every step here.
        self.proposer.host.width = self.width if wanted is None else wanted
        drafts = self.proposer.propose(
            num_speculative_tokens=self.proposer.num_speculative_tokens,
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
            num_rejected_tokens_gpu=rejected,
        )
        self.proposer.end_step()
        for row, end in zip(rows, texts_end, strict=True):
            if not row.in_prompt:
                self.texts[row.request, end] = row.bonus
        return drafts


class SpeculatorHarness(Harness):
    """The harness for Model Runner V2."""

    def nan_drafts(self) -> int:
        records, width = (
            self.proposer.slots.records,
            self.proposer.num_speculative_steps,
        )
        held = records[:, NUM_RECORD_FIELDS : NUM_RECORD_FIELDS + width]
        return int((held < 0.0).sum())

    def _load(self, target: HfTarget) -> None:
        most = self.config.scheduler_config.max_num_seqs
        nothing = SimpleNamespace(gpu=torch.zeros(most, 1, dtype=torch.int32))
        states = SimpleNamespace(
            all_token_ids=nothing,
            total_len=nothing,
            last_sampled_tokens=torch.zeros(most, 1, dtype=torch.int64),
        )
        runner: Any = SimpleNamespace(
            device=torch.device("cpu"), req_states=states, output_copy_stream=None
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(speculator, "has_room_for_texts", lambda *_: False)  # none are kept here
            self.proposer = PlannedSpeculator(self.config, runner)
        self.proposer.load_model(target)
        self.target = target

    def _initialize_attention(self, cache: KVCacheConfig) -> None:
        drafter = self.proposer
        self.tables = BlockTables(
            [CACHE_BLOCK],
            drafter.max_num_reqs,
            drafter.max_num_tokens,
            [self.blocks_each],
            torch.device("cpu"),
        )
        drafter.set_attn(None, cache, self.tables, None, None)
        drafter.init_cudagraph_manager(CUDAGraphMode.NONE)

    def _propose(self, rows: list[Row], starts: list[int], wanted: int | None) -> list[list[int]]:
        drafter = self.proposer
        counts = np.array([len(row.features) for row in rows], dtype=np.int32)
        requests = [row.request for row in rows]
        self.tables.input_block_tables[0][: len(rows)] = self.blocks[requests]
        rejected = torch.tensor([row.num_rejected for row in rows], dtype=torch.int32)
        sampled = torch.tensor([int(not row.in_prompt) for row in rows], dtype=torch.int32)
        last_sampled = drafter.batch.newest
        last_sampled[requests, 0] = torch.tensor([row.bonus for row in rows])
        seq_lens = torch.from_numpy(np.array(starts, dtype=np.int32) + counts)
        batch = SimpleNamespace(
            req_ids=[str(request) for request in requests],
            num_reqs=len(rows),
            num_tokens=int(counts.sum()),
            num_draft_tokens_per_req=rejected.numpy(),
            num_scheduled_tokens=counts,
            num_computed_tokens_np=np.array(starts),
            idx_mapping=torch.tensor(requests),
            idx_mapping_np=np.array(requests),
            positions=positions_of(rows, starts),
            query_start_loc=query_starts(rows),
            seq_lens_cpu_upper_bound=seq_lens,
        )
        drafter.plan = StepPlan(runs_block=True, length=drafter.num_speculative_steps)
        _, taps = self.target(torch.cat([row.features for row in rows]))
        tokens = drafter.propose(
            batch,
            {},
            {},
            None,
            taps,
            sampled,
            rejected,
            last_sampled,
            torch.zeros(1, drafter.max_num_reqs, dtype=torch.int32),
            torch.ones(drafter.max_num_reqs),  # temperatures and seeds, which drafts do not use
            torch.arange(drafter.max_num_reqs),
            num_speculative_tokens=drafter.num_speculative_steps if wanted is None else wanted,
        )
        # Those that the scheduler has places for and the device regards as drafts.
        limit = drafted_length(drafter.draft_model_config)
        ends = np.full(len(rows), min(self.max_tokens, limit))
        context = starts + counts - rejected.numpy()
        most = drafter.num_speculative_steps if wanted is None else wanted
        lengths = draft_limits(context, ends, most, sampled.numpy() > 0)
        finite = (
            (drafter.drafts.confidence[: len(rows)] > 0).int().cumprod(dim=1).sum(dim=1).numpy()
        )
        return [
            row[:k].tolist() for row, k in zip(tokens, np.minimum(lengths, finite), strict=True)
        ]


DrafterHarness: type[Harness] = SpeculatorHarness if USES_V2 else ProposerHarness
