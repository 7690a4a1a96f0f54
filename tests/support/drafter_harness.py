"""Our drafting code on a real paged cache, without an engine around it, on either model runner."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.block_table import BlockTables

from support.cached_drafter import (
    CACHE_BLOCK,
    Harness,
    HfTarget,
    Row,
    positions_of,
    query_starts,
)
from support.engines import USES_V2
from vllm_dflash.config.draft_config import drafted_length
from vllm_dflash.engine.block_layout import draft_limits
from vllm_dflash.engine.v1.proposer import PlannedProposer
from vllm_dflash.engine.v2 import speculator
from vllm_dflash.engine.v2.draft_slots import NUM_RECORD_FIELDS
from vllm_dflash.engine.v2.exchange import StepPlan
from vllm_dflash.engine.v2.speculator import PlannedSpeculator


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
        params = SimpleNamespace(max_tokens=self.max_tokens, min_tokens=self.min_tokens)
        request = SimpleNamespace(num_prompt_tokens=0, sampling_params=params)
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
        # Those that the scheduler has draft slots for and the device regards as drafts.
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
