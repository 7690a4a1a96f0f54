"""The proposer for vLLM's V1 model runner: vLLM calls it at start-up and in every step.

It converts vLLM's types for the step itself (`host_step.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig, replace
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.sample.ops.logprobs import batched_count_greater_than
from vllm.v1.spec_decode.dflash import DFlashProposer
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_dflash.config.draft_config import drafted_length
from vllm_dflash.config.engine_options import EngineOptions
from vllm_dflash.engine.attention_groups import split_by_kind
from vllm_dflash.engine.block_layout import below_least, bonus_tokens, length_limits
from vllm_dflash.engine.own_limits import OwnLimits
from vllm_dflash.engine.reporting.statistics import DraftStatistics
from vllm_dflash.engine.scheduler_output import fresh_cache_blocks, newly_admitted
from vllm_dflash.engine.v1.backlog import ContextBacklog, useless_cache_blocks
from vllm_dflash.engine.v1.block_forward import BlockForward
from vllm_dflash.engine.v1.host_step import HostStep
from vllm_dflash.engine.v1.target_batch import TargetBatch
from vllm_dflash.engine.vllm_fixes.short_rotary_tables import cover_positions
from vllm_dflash.engine.warm import WarmState
from vllm_dflash.model.draft_model import DFlashDraftModel
from vllm_dflash.planning import Ints
from vllm_dflash.planning.costs import StepCosts
from vllm_dflash.planning.planner import Planner
from vllm_dflash.planning.step import StepRecord
from vllm_dflash.planning.texts import NgramIndex

# Under TORCHDYNAMO_DISABLE=1, torch.compile leaves a function as it is.
LOGPROB_RANK_CODE = getattr(
    batched_count_greater_than, "_torchdynamo_orig_callable", batched_count_greater_than
).__code__
"""Code of vLLM's function that ranks a token for logprobs. vLLM compiles it for the first request
that asks for logprobs, also without speculative decoding (2 s; 9 s the first time on a machine)."""


class PlannedProposer(DFlashProposer):
    """Drafts a block per request in one forward pass; replaces vLLM's own proposer.

    A subclass because the runner checks its drafter's class; only the buffers and start-up of
    vLLM's class are used. Written for synchronous scheduling, as the V1 runner has on CPUs: the
    ragged lists it returns tell the scheduler each request's draft length.
    """

    model: DFlashDraftModel
    runner: GPUModelRunner
    host: HostStep
    """Drafts in each step and counts; set once the cache exists."""
    statistics: DraftStatistics

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, runner: GPUModelRunner
    ) -> None:
        super().__init__(vllm_config, device, runner)
        self.runner = runner
        self.options = EngineOptions.from_config(vllm_config)
        self.spec = self.options.drafter
        self.width = self.options.draft_width
        """Maximum drafts of a block; a request can have more free drafts."""
        self.most_free = self.options.most_free
        self.feature_width = len(self.spec.taps) * self.spec.target_hidden_size
        self.runs_target_alone = False
        """Whether the runner's dummy runs leave out the drafter."""
        self.warm = WarmState(lambda: (self.host.backlog,), late=LOGPROB_RANK_CODE)
        self.record: StepRecord | None = None
        """The current step, from the target's output to `end_step`."""
        self._own_limits = OwnLimits()
        self._limited: Sequence[str] = ()
        """Requests of the last batch; see `_length_limits`."""
        self._sampled = np.zeros((0, 1), np.int32)
        """Tokens sampled in the current step, then -1, [R, most of any]."""

    # --- the start ------------------------------------------------------------------------------

    def _create_draft_vllm_config(self) -> VllmConfig:
        base = super()._create_draft_vllm_config()
        attention = replace(base.attention_config, use_non_causal=not all(self.spec.causal))
        return replace(base, attention_config=attention)

    def _maybe_share_embeddings(self, target_language_model: nn.Module) -> None:
        self.model.share_vocabulary(target_language_model)

    def _maybe_share_lm_head(self, target_language_model: nn.Module) -> None:
        """Do nothing: `_maybe_share_embeddings` also shares the head."""

    def load_model(self, target_model: nn.Module) -> None:
        """Load the drafter."""
        super().load_model(target_model)
        cover_positions(self.model, self.max_model_len)
        self.block = BlockForward(self.model, self.vllm_config)

    def initialize_attn_backend(
        self, kv_cache_config: KVCacheConfig, kernel_block_sizes: list[int] | None = None
    ) -> None:
        """Find the drafter's cache group, and group its layers by kind for attention metadata."""
        super().initialize_attn_backend(kv_cache_config, kernel_block_sizes)
        self.block.groups = split_by_kind(
            self.draft_attn_groups[0],
            self.model.context.attentions,
            self.vllm_config,
            self.device,
            kernel_block_sizes[self.kv_cache_gid] if kernel_block_sizes else None,
        )
        self.host = HostStep(self.options, self.block, self.model.context, self.block_size)
        self.statistics = self.host.statistics
        group = kv_cache_config.kv_cache_groups[self.kv_cache_gid]
        self.scheduler_page_size = group.kv_cache_spec.block_size
        """Tokens per cache page of the scheduler; kernels may use smaller ones (`block_size`)."""
        self.num_slots = kv_cache_config.num_blocks * self.scheduler_page_size
        self.num_cache_groups = len(kv_cache_config.kv_cache_groups)

    @torch.inference_mode()
    def dummy_run(
        self,
        num_tokens: int,
        use_cudagraphs: bool = True,
        is_graph_capturing: bool = False,
        slot_mappings: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """Profile and compile with the largest context and blocks, without writing to the cache."""
        if self.runs_target_alone:
            return
        features = torch.zeros(num_tokens, self.feature_width, dtype=self.dtype, device=self.device)
        positions = torch.zeros(num_tokens, dtype=torch.int64, device=self.device)
        self.model.context.project(self.model.context.fuse(features), positions)
        num_queries = min(num_tokens, self.max_batch_size * self.options.block_rows)
        hidden = self.block.run(None, {}, self.input_ids[:num_queries], positions[:num_queries])
        if self.model.has_candidates:
            self.model.compute_candidates(hidden)
        else:
            self.model.compute_logits(hidden)

    def start_planning(self, costs: StepCosts) -> None:
        """Start planning draft lengths from these costs."""
        host, max_requests = self.host, self.max_batch_size
        host.planner = Planner(self.width, max_requests, costs, most_free=self.most_free)
        if self.most_free:
            host.free_drafts = NgramIndex(max_requests)
        # No backlog with a connector, which passes on the cache after each step, so the cache must
        # be complete; or with several cache groups, because the backlog tracks the owners of blocks
        # in only one.
        if self.vllm_config.kv_transfer_config is None and self.num_cache_groups == 1:
            host.backlog = ContextBacklog(
                self.model.context,
                self.feature_width,
                self.dtype,
                num_slots=self.num_slots,
                page_size=self.block_size,
            )

    # --- every step, in this order --------------------------------------------------------------

    def begin_step(self, scheduler_output: SchedulerOutput) -> None:
        """Prepare for a step: drop waiting context of blocks that get new owners, or that no
        request can find as a cached prefix."""
        batch, backlog = self.runner.input_batch, self.host.backlog
        if backlog is not None:
            # Preempted requests have lost their blocks already; the runner still lists them.
            still_own = scheduler_output.finished_req_ids & batch.req_id_to_index.keys()
            group = self.kv_cache_gid, self.scheduler_page_size
            useless = useless_cache_blocks(
                [self.runner.requests[name] for name in still_own],
                *group,
                caches_prefixes=self.vllm_config.cache_config.enable_prefix_caching,
            )
            backlog.drop(
                fresh_cache_blocks(scheduler_output, *group) + useless, self.scheduler_page_size
            )
        self._own_limits.take(scheduler_output)
        admitted = newly_admitted(scheduler_output)
        if admitted:  # it may be another turn of the same request
            self._limited = ()
        self.host.begin_step(admitted, scheduler_output.finished_req_ids)

    def prepare_next_token_ids_padded(
        self,
        sampled_token_ids: torch.Tensor,
        requests: dict[str, CachedRequestState],
        gpu_input_batch: InputBatch,
        discard_request_mask: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Bonus token and actual number of new tokens of each request, [R] each.

        vLLM calls this first in each step. Unlike vLLM's version, it does not look up tokens for
        requests still in their prompt: they are not drafted, so their bonus token is never read.
        """
        num_requests, self._sampled = len(sampled_token_ids), sampled_token_ids.numpy()
        bonus, produced = bonus_tokens(
            self._sampled,
            discard_request_mask.numpy()[:num_requests],
            gpu_input_batch.vocab_size,
        )
        self.record = StepRecord(gpu_input_batch.req_ids[:num_requests], produced.astype(np.int64))
        return torch.from_numpy(bonus), torch.from_numpy(produced)

    def prepare_inputs_padded(
        self,
        common_attn_metadata: CommonAttentionMetadata,
        spec_decode_metadata: SpecDecodeMetadata,
        valid_sampled_tokens_count: torch.Tensor,
    ) -> tuple[CommonAttentionMetadata, None, torch.Tensor]:
        """The unchanged batch, and the number of rejected drafts of each request, [R]. Called only
        if drafts were verified."""
        assert self.record is not None
        verified = np.array(spec_decode_metadata.num_draft_tokens)
        self.record.verified = verified
        rejected = np.where(verified > 0, verified + 1 - valid_sampled_tokens_count.numpy(), 0)
        return common_attn_metadata, None, torch.from_numpy(rejected.astype(np.int32))

    @torch.inference_mode()
    def propose(
        self,
        target_positions: torch.Tensor,
        target_hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,
        common_attn_metadata: CommonAttentionMetadata,
        num_rejected_tokens_gpu: torch.Tensor | None = None,
        **_: object,
    ) -> list[list[int]]:
        """Store this step's context, or let it wait, and draft the next tokens.

        Args:
            target_positions: positions of this step's T scheduled rows, [T].
            target_hidden_states: taps concatenated in ascending layer order, [T, m * H].
            next_token_ids: the bonus token of each request, [R].
            common_attn_metadata: metadata of the target's batch, including rejected rows.
            num_rejected_tokens_gpu: rejected rows at each request's end, [R]; None if no
                drafts were verified.

        Returns:
            Drafts of each request; empty if it gets none.
        """
        step, batch, runner = self.record, common_attn_metadata, self.runner
        assert step is not None
        num_rejected = np.zeros(batch.num_reqs, np.int32)
        if num_rejected_tokens_gpu is not None:
            num_rejected = num_rejected_tokens_gpu.numpy()
        step.rows = batch.num_actual_tokens
        context_lens = batch.seq_lens[: batch.num_reqs].numpy() - num_rejected
        step.context_lens = context_lens.astype(np.int64)
        text_limits, block_limits = self._length_limits(step)
        if self._own_limits:  # their drafts end there
            before = step.context_lens + 2  # see `draft_limits`
            text_limits = before + self._own_limits.cut(text_limits - before, step.ids)
            block_limits = np.minimum(block_limits, text_limits)
        if runner.input_batch.req_prompt_embeds:
            # Such a prompt has no tokens; its row may hold another request's.
            text_limits = text_limits.copy()
            text_limits[list(runner.input_batch.req_prompt_embeds)] = 0
        # Limit free drafts so that one step can verify them for every request: the scheduler also
        # reserves rows for each request's block, and requests without room wait.
        budget = self.vllm_config.scheduler_config.max_num_batched_tokens
        room = max(budget // len(runner.requests) - 2 - self.width, 0)
        return self.host.run(
            step,
            TargetBatch(
                features=target_hidden_states,
                positions=target_positions,
                slots=batch.slot_mapping[: len(target_hidden_states)],
                query_start_loc=batch.query_start_loc_cpu.numpy(),
                num_rejected=num_rejected,
                block_table=batch.block_table_tensor,
                sampled=self._sampled,
                bonus_ids=next_token_ids.numpy(),
                texts=runner.input_batch.token_ids_cpu,
                text_limits=text_limits,
                block_limits=block_limits,
                most_free=min(self.most_free, room),
            ),
        )

    def _length_limits(self, step: StepRecord) -> tuple[Ints, Ints]:
        """Return the maximum length of each request, and with drafts of a block, [R] each."""
        if self._limited != step.ids:
            requests, most = self.runner.requests, self.runner.max_model_len
            self._limited, self._limits = step.ids, length_limits(requests, step.ids, most)
        limits = below_least(*self._limits, step.context_lens)
        # vLLM may lower its limit after start-up.
        return limits, limits.clip(max=drafted_length(self.draft_model_config))

    def end_step(self) -> None:
        """End the current step, if there is one."""
        step, self.record = self.record, None
        if step is not None:
            self.host.end(step)
