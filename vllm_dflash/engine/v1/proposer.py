"""The proposer for vLLM's V1 model runner: context every step, drafts where they pay."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig, replace
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_dflash.config.options import DFlashOptions
from vllm_dflash.engine.accounting import StepAccounting
from vllm_dflash.engine.agreement import agreed_lengths, agreed_plan
from vllm_dflash.engine.attention_groups import split_by_kind
from vllm_dflash.engine.block_layout import block_inputs, bonus_tokens, draft_lengths, kept_rows
from vllm_dflash.engine.clock import StepClock
from vllm_dflash.engine.statistics import DraftStatistics
from vllm_dflash.engine.v1.backlog import ContextBacklog
from vllm_dflash.engine.v1.block_forward import BlockForward
from vllm_dflash.engine.warm import WarmState
from vllm_dflash.model.draft_model import DFlashDraftModel
from vllm_dflash.planning.costs import StepCosts
from vllm_dflash.planning.fixed_length import FixedLength
from vllm_dflash.planning.length_policy import LengthPolicy
from vllm_dflash.planning.planner import Plan, Planner


class DFlashProposer(StepAccounting, SpecDecodeBaseProposer):
    """Drafts a block per request in one forward; replaces vLLM's class of the same name.

    Every step: take the context of all scheduled tokens the target did not reject, then draft
    for the requests for which the length policy says so. Where it says nobody, nothing is
    computed, and context is stored now and then.

    Written for synchronous scheduling, which is what the V1 runner does on CPUs: the ragged
    lists it returns tell the scheduler each request's length.
    """

    model: DFlashDraftModel
    runner: GPUModelRunner

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, runner: GPUModelRunner
    ) -> None:
        super().__init__(vllm_config, device, pass_hidden_states_to_model=True, runner=runner)
        self.spec = DFlashOptions.of(vllm_config).drafter
        self.runner = runner
        self.lengths: LengthPolicy = FixedLength(self.num_speculative_tokens)
        self.backlog: ContextBacklog | None = None
        """Without one, context is stored in every step."""
        self.clock = StepClock()
        self.statistics = DraftStatistics(self.num_speculative_tokens)
        self.warm = WarmState(self._persistent_buffers)
        self.has_drafts = False
        """Whether the last step drafted anything for anybody."""
        self.length_limit = min(
            self.max_model_len, self.draft_model_config.max_model_len or self.max_model_len
        )
        self.feature_width = len(self.spec.taps) * self.spec.target_hidden_size
        self._caches_prefixes = vllm_config.cache_config.enable_prefix_caching
        self._max_query_tokens = self.max_batch_size * (1 + self.num_speculative_tokens)
        self._rest = 0
        self._resting_ids: list[str] = []
        # The base class's buffers for models that draft token by token.
        self.parallel_drafting_hidden_state_tensor = None

    # --- start-up -------------------------------------------------------------------------

    def _create_draft_vllm_config(self) -> VllmConfig:
        base = super()._create_draft_vllm_config()
        attention = replace(base.attention_config, use_non_causal=not all(self.spec.causal))
        return replace(base, attention_config=attention)

    def _maybe_share_embeddings(self, target_language_model: nn.Module) -> None:
        self.model.share_vocabulary(target_language_model)

    def _maybe_share_lm_head(self, target_language_model: nn.Module) -> None:
        """The head came with the embedding."""

    def load_model(self, target_model: nn.Module) -> None:
        """Load the drafter."""
        super().load_model(target_model)
        self.block = BlockForward(self.model, self.vllm_config, [])

    def initialize_attn_backend(
        self, kv_cache_config: KVCacheConfig, kernel_block_sizes: list[int] | None = None
    ) -> None:
        """Find the drafter's cache group, and build metadata for each kind of layer in it."""
        super().initialize_attn_backend(kv_cache_config, kernel_block_sizes)
        groups = split_by_kind(
            self.draft_attn_groups[0],
            self.model.context.attentions,
            self.vllm_config,
            self.device,
            kernel_block_sizes[self.kv_cache_gid] if kernel_block_sizes else None,
        )
        self.block = BlockForward(self.model, self.vllm_config, groups)

    @torch.inference_mode()
    def dummy_run(
        self,
        num_tokens: int,
        use_cudagraphs: bool = True,
        is_graph_capturing: bool = False,
        slot_mappings: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """Profile and compile: the largest context and the largest block, writing nothing."""
        if self._is_left_out:
            return
        features = torch.zeros(num_tokens, self.feature_width, dtype=self.dtype, device=self.device)
        positions = torch.zeros(num_tokens, dtype=torch.int64, device=self.device)
        self.model.context.project(self.model.context.fuse(features), positions)
        num_queries = min(num_tokens, self._max_query_tokens)
        hidden = self.block.run(None, {}, self.input_ids[:num_queries], positions[:num_queries])
        self.model.compute_logits(hidden)

    def adapt_lengths(self, costs: StepCosts) -> None:
        """From now on plan draft lengths, starting from these costs."""
        self.lengths = Planner(self.num_speculative_tokens, self.max_batch_size, costs)
        # A connector hands the cache on with each step, so it must be complete.
        if self.vllm_config.kv_transfer_config is None:
            self.backlog = ContextBacklog(
                self.model.context, self.feature_width, self.dtype, self.max_batch_size
            )

    # --- every step -----------------------------------------------------------------------

    def forget(self, resumed: Collection[str]) -> None:
        """Take note that this step computes these requests from the start, in other blocks."""
        if self.backlog is not None:
            self.backlog.forget(resumed)

    def prepare_next_token_ids_padded(
        self,
        sampled_token_ids: torch.Tensor,
        requests: dict[str, CachedRequestState],
        gpu_input_batch: InputBatch,
        discard_request_mask: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Bonus token and number of tokens each request really got, [R] each.

        Unlike vLLM's own, looks no token up for requests still in their prompt: those are not
        drafted, so their bonus token is never read.
        """
        bonus, counts = bonus_tokens(
            sampled_token_ids.numpy(),
            discard_request_mask.numpy()[: len(sampled_token_ids)],
            gpu_input_batch.vocab_size,
        )
        return torch.from_numpy(bonus), torch.from_numpy(counts)

    def prepare_inputs_padded(
        self,
        common_attn_metadata: CommonAttentionMetadata,
        spec_decode_metadata: SpecDecodeMetadata,
        valid_sampled_tokens_count: torch.Tensor,
    ) -> tuple[CommonAttentionMetadata, None, torch.Tensor]:
        """The batch as it is, and how many drafts of each request were rejected, [R].

        Also the one place that sees what became of the drafts.
        """
        if not any(spec_decode_metadata.num_draft_tokens):
            return common_attn_metadata, None, torch.zeros_like(valid_sampled_tokens_count)
        drafted = np.array(spec_decode_metadata.num_draft_tokens, dtype=np.int32)
        produced = valid_sampled_tokens_count.numpy()
        self._num_verified = int(drafted.sum())
        self._num_accepted = int(np.maximum(produced - 1, 0)[drafted > 0].sum())
        self.statistics.observe_verification(drafted, produced)
        verified = np.where(produced > 0, drafted, 0)  # a discarded sample says nothing
        with self.clock.timing("planning"):
            ids = self._batch_ids(len(drafted))
            self.lengths.observe_verification(ids, verified, produced - 1)
        rejected = np.where(drafted > 0, drafted + 1 - produced, 0)
        return common_attn_metadata, None, torch.from_numpy(rejected)

    @torch.inference_mode()
    def propose(
        self,
        num_speculative_tokens: int,
        target_token_ids: torch.Tensor,
        target_positions: torch.Tensor,
        target_hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,
        token_indices_to_sample: torch.Tensor | None,
        common_attn_metadata: CommonAttentionMetadata,
        sampling_metadata: SamplingMetadata,
        mm_embed_inputs: tuple[list[torch.Tensor], torch.Tensor] | None = None,
        num_rejected_tokens_gpu: torch.Tensor | None = None,
        slot_mappings: dict[str, torch.Tensor] | list[dict[str, torch.Tensor]] | None = None,
    ) -> list[list[int]]:
        """Take this step's context and draft the next tokens.

        Args:
            num_speculative_tokens: K for this step.
            target_positions: of this step's T scheduled rows, [T].
            target_hidden_states: taps concatenated in ascending layer order, [T, m * H].
            next_token_ids: the bonus token of each request, [R].
            common_attn_metadata: of the target's batch, rejected rows included.
            num_rejected_tokens_gpu: rejected rows at each request's end, [R]; None if no
                drafts were verified.

        Returns:
            Drafts of each request, empty where none are worth it.
        """
        batch = common_attn_metadata
        ids = self._batch_ids(batch.num_reqs)
        num_rejected = np.zeros(batch.num_reqs, dtype=np.int32)
        if num_rejected_tokens_gpu is not None:
            num_rejected = num_rejected_tokens_gpu.numpy()
        past_prompt = ~self.runner.discard_request_mask.np[: batch.num_reqs]
        self.has_drafts = False
        self._begin_step(batch, ids, past_prompt)
        self._take_context(target_positions, target_hidden_states, batch, ids, num_rejected)
        drafts: list[list[int]] = [[] for _ in ids]
        if self._rests(ids):
            self.statistics.steps += 1
            self.statistics.skipped_steps += 1
            return drafts

        context_lens = batch.seq_lens[: batch.num_reqs].numpy() - num_rejected
        room = draft_lengths(
            context_lens, self._length_limits(ids), num_speculative_tokens, past_prompt
        )
        plan = self._plan(ids, room)
        self.statistics.observe_plan(plan, possible=bool(room.any()))
        if not plan.width:
            self._rest, self._resting_ids = plan.rest, ids
            return drafts
        if self.backlog is not None:
            with self.clock.timing("context"):
                self.clock.context_rows += self.backlog.store(plan.drafted)
        inputs = block_inputs(
            context_lens,
            np.minimum(room, plan.width) * plan.drafted,
            next_token_ids.numpy(),
            self.spec.mask_token_id,
            batch.block_table_tensor.numpy(),
            self.block_size,
        )
        with self.clock.timing("draft"):
            drafted = self.block.draft(inputs, batch.block_table_tensor)
        self.clock.draft_rows = len(inputs.input_ids)
        with self.clock.timing("planning"):
            usable = np.zeros_like(room)
            usable[inputs.requests] = [len(tokens) for tokens in drafted.tokens]
            lengths = self.lengths.lengths(plan, ids, usable, drafted.confidence)
        lengths = agreed_lengths(lengths)
        for request, tokens, length in zip(
            inputs.requests.tolist(), drafted.tokens, lengths.tolist(), strict=True
        ):
            drafts[request] = tokens[:length]
        self.has_drafts = bool(lengths.any())
        self.statistics.nan_drafts += len(inputs.mask_rows) - int(usable.sum())
        self.statistics.observe_lengths(lengths)
        return drafts

    def end_step(self) -> None:
        """The runner is done with a step."""
        # A step that verified drafts is unlike the undrafted ones that may follow it.
        self.account_for_step(more_alike=self._rest > 0 and not self._num_verified)

    def collect_statistics(self) -> DraftStatistics:
        """What was counted so far."""
        return self.statistics

    def _persistent_buffers(self) -> list[torch.Tensor]:
        return [] if self.backlog is None else self.backlog.buffers()

    def _batch_ids(self, num_requests: int) -> list[str]:
        return self.runner.input_batch.req_ids[:num_requests]

    def _begin_step(
        self, batch: CommonAttentionMetadata, ids: list[str], past_prompt: np.ndarray
    ) -> None:
        num_decoded = int(past_prompt.sum()) + self._num_verified
        self.lengths.observe_batch(batch.num_actual_tokens - num_decoded)
        self.clock.begin(
            ids,
            batch.num_actual_tokens,
            only_decodes=batch.num_actual_tokens == num_decoded and bool(past_prompt.all()),
        )

    def _rests(self, ids: list[str]) -> bool:
        """Whether an earlier plan said that nobody drafts in this step either."""
        if not self._rest or ids != self._resting_ids:
            self._rest = 0
            return False
        self._rest -= 1
        return True

    def _take_context(
        self,
        positions: torch.Tensor,
        features: torch.Tensor,
        batch: CommonAttentionMetadata,
        ids: list[str],
        num_rejected: np.ndarray,
    ) -> None:
        slots = batch.slot_mapping[: len(features)]
        row_starts = batch.query_start_loc_cpu.numpy()
        rows: slice | torch.Tensor
        if num_rejected[:-1].any():
            rows = torch.from_numpy(kept_rows(row_starts, num_rejected))
        else:  # what is kept is in one piece, so nothing need be copied
            rows = slice(len(features) - int(num_rejected[-1]))
        kept = features[rows], positions[rows], slots[rows]
        with self.clock.timing("context"):
            if self.backlog is None:
                self.model.context.store(*kept)
                stored = len(kept[0])
            else:
                stored = self.backlog.update_batch(
                    ids, self.runner.requests, may_return=self._caches_prefixes
                )
                stored += self.backlog.add(*kept, np.diff(row_starts) - num_rejected)
        self.clock.context_rows += stored

    def _length_limits(self, ids: list[str]) -> np.ndarray:
        """Tokens each request may come to: its own end or the context limit, [R]."""
        limits = np.full(len(ids), self.length_limit, dtype=np.int64)
        for row, req_id in enumerate(ids):
            request = self.runner.requests[req_id]
            if request.sampling_params is not None and request.sampling_params.max_tokens:
                end = request.num_prompt_tokens + request.sampling_params.max_tokens
                limits[row] = min(limits[row], end)
        return limits

    def _plan(self, ids: list[str], room: np.ndarray) -> Plan:
        """Whom to draft and how wide, the same on every tensor-parallel rank."""
        with self.clock.timing("planning"):
            pending = np.zeros_like(room) if self.backlog is None else self.backlog.pending()
            plan = self.lengths.plan(ids, room, pending)
        return agreed_plan(plan)
