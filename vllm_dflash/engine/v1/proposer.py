"""The proposer for vLLM's V1 model runner: context is kept, drafts are made where they pay."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig, replace
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.dflash import DFlashProposer
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_dflash.config.draft_config import drafted_length
from vllm_dflash.config.options import DFlashOptions
from vllm_dflash.engine.attention_groups import split_by_kind
from vllm_dflash.engine.block_layout import (
    block_inputs,
    bonus_tokens,
    draft_limits,
    kept_rows,
    length_limits,
)
from vllm_dflash.engine.length_control import LengthControl
from vllm_dflash.engine.padding import have_own_drafts
from vllm_dflash.engine.statistics import DraftStatistics
from vllm_dflash.engine.v1.backlog import ContextBacklog
from vllm_dflash.engine.v1.block_forward import BlockForward
from vllm_dflash.engine.vllm_fixes.short_rotary_tables import cover_positions
from vllm_dflash.engine.warm import WarmState
from vllm_dflash.model.draft_model import DFlashDraftModel
from vllm_dflash.planning import Ints
from vllm_dflash.planning.costs import StepCosts
from vllm_dflash.planning.planner import Planner
from vllm_dflash.planning.step import Step


class PlannedProposer(DFlashProposer):
    """Drafts a block per request in one forward, in the place of vLLM's own proposer.

    Every step: take the context of all scheduled tokens the target did not reject, then draft
    for the requests for which the plan says so. Where lengths are planned and it says nobody,
    nothing is computed, and context is stored now and then.

    Written for synchronous scheduling, which is what the V1 runner does on CPUs: the ragged
    lists it returns tell the scheduler each request's length. Nothing of vLLM's class is used but
    its buffers and its start-up; the runner knows its drafter by that class.
    """

    model: DFlashDraftModel
    runner: GPUModelRunner

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, runner: GPUModelRunner
    ) -> None:
        super().__init__(vllm_config, device, runner)
        self.runner = runner
        self.spec = DFlashOptions.of(vllm_config).drafter
        self.lengths = LengthControl(self.num_speculative_tokens)
        self.backlog: ContextBacklog | None = None
        """Without one, context is stored in every step."""
        self.warm = WarmState(self._persistent_buffers)
        self.step: Step | None = None
        """The one that runs, from when the target's output is there."""
        self.all_drafted: Sequence[str] = ()
        """The last batch, if all of it was drafted."""
        self.has_drafts = False
        """Whether any draft of the last step is to be verified."""
        self.runs_target_alone = False
        """Whether dummy runs of the runner are to leave the drafter out."""
        self.newly_admitted: Collection[str] = ()
        """Requests whose drafts in this step are vLLM's placeholders."""
        self.feature_width = len(self.spec.taps) * self.spec.target_hidden_size

    @property
    def length_limit(self) -> int:
        """Tokens a request may come to and be drafted. vLLM may lower its limit after start-up."""
        return min(self.max_model_len, drafted_length(self.draft_model_config))

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
        cover_positions(self.model, self.max_model_len)
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
        group = kv_cache_config.kv_cache_groups[self.kv_cache_gid]
        self.num_slots = kv_cache_config.num_blocks * group.kv_cache_spec.block_size
        self.num_cache_groups = len(kv_cache_config.kv_cache_groups)

    @torch.inference_mode()
    def dummy_run(
        self,
        num_tokens: int,
        use_cudagraphs: bool = True,
        is_graph_capturing: bool = False,
        slot_mappings: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """Profile and compile: the largest context and the largest block, writing nothing."""
        if self.runs_target_alone:
            return
        features = torch.zeros(num_tokens, self.feature_width, dtype=self.dtype, device=self.device)
        positions = torch.zeros(num_tokens, dtype=torch.int64, device=self.device)
        self.model.context.project(self.model.context.fuse(features), positions)
        num_queries = min(num_tokens, self.max_query_tokens)
        hidden = self.block.run(None, {}, self.input_ids[:num_queries], positions[:num_queries])
        self.model.compute_logits(hidden)

    def adapt_lengths(self, costs: StepCosts) -> None:
        """From now on plan draft lengths, starting from these costs."""
        self.lengths.policy = Planner(self.num_speculative_tokens, self.max_batch_size, costs)
        # A connector hands the cache on with each step, so it must be complete. And of several
        # cache groups, blocks that another one is given would have to be looked after as well.
        if self.vllm_config.kv_transfer_config is None and self.num_cache_groups == 1:
            self.backlog = ContextBacklog(
                self.model.context,
                self.feature_width,
                self.dtype,
                num_slots=self.num_slots,
                block_size=self.block_size,
            )

    # --- every step -----------------------------------------------------------------------

    def drop_context(self, blocks: Collection[int], block_size: int) -> None:
        """Before a step: cache blocks that it gives to somebody else, or that are of no more use.

        The context that waits for them is not to be stored any more.
        """
        if self.backlog is not None:
            self.backlog.drop(blocks, block_size)

    def prepare_next_token_ids_padded(
        self,
        sampled_token_ids: torch.Tensor,
        requests: dict[str, CachedRequestState],
        gpu_input_batch: InputBatch,
        discard_request_mask: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Bonus token and number of tokens each request really got, [R] each.

        The first that the proposer hears of a step. Unlike vLLM's own, looks no token up for
        requests still in their prompt: those are not drafted, so their bonus token is never read.
        """
        num_requests = len(sampled_token_ids)
        bonus, produced = bonus_tokens(
            sampled_token_ids.numpy(),
            discard_request_mask.numpy()[:num_requests],
            gpu_input_batch.vocab_size,
        )
        self.step = Step(gpu_input_batch.req_ids[:num_requests], produced.astype(np.int64))
        return torch.from_numpy(bonus), torch.from_numpy(produced)

    def prepare_inputs_padded(
        self,
        common_attn_metadata: CommonAttentionMetadata,
        spec_decode_metadata: SpecDecodeMetadata,
        valid_sampled_tokens_count: torch.Tensor,
    ) -> tuple[CommonAttentionMetadata, None, torch.Tensor]:
        """The batch as it is, and how many drafts of each request were rejected, [R].

        Also the one place that sees what became of the drafts.
        """
        assert self.step is not None
        if not any(spec_decode_metadata.num_draft_tokens):
            return common_attn_metadata, None, torch.zeros_like(valid_sampled_tokens_count)
        drafted = np.array(spec_decode_metadata.num_draft_tokens)
        produced = self.step.produced
        tells = (produced > 0) & have_own_drafts(self.step.ids, self.newly_admitted)
        self.step.verified = np.where(tells, drafted, 0)  # a discarded sample says nothing
        self.lengths.statistics.observe_verification(self.step)
        rejected = np.where(drafted > 0, drafted + 1 - produced, 0)
        return common_attn_metadata, None, torch.from_numpy(rejected.astype(np.int32))

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
        step, batch = self.step, common_attn_metadata
        assert step is not None
        step.rows = batch.num_actual_tokens
        rejected = num_rejected_tokens_gpu
        num_rejected = np.zeros(batch.num_reqs, np.int32) if rejected is None else rejected.numpy()
        self._take_context(step, target_positions, target_hidden_states, batch, num_rejected)
        self.has_drafts, self.all_drafted = False, ()
        drafts: list[list[int]] = [[] for _ in step.ids]
        context_lens = batch.seq_lens[: batch.num_reqs].numpy() - num_rejected
        step.context_lens = context_lens.astype(np.int64)
        if self.lengths.take_skip(step):
            return drafts

        block_table = batch.block_table_tensor.numpy()
        ends = length_limits(self.runner.requests, step.ids, self.length_limit)
        step.limits = draft_limits(context_lens, ends, num_speculative_tokens, step.decoding)
        if self.backlog is not None:
            with step.timing("planning"):
                step.waiting = self.backlog.count(block_table, context_lens)
        plan = self.lengths.plan(step)
        if not plan.width:
            return drafts
        if self.backlog is not None:
            with step.timing("context"):
                step.context_rows += self.backlog.store(
                    block_table[plan.drafted], context_lens[plan.drafted]
                )
        inputs = block_inputs(
            context_lens,
            np.minimum(step.limits, plan.width) * plan.drafted,
            next_token_ids.numpy(),
            self.spec.mask_token_id,
            block_table,
            self.block_size,
        )
        with step.timing("draft"):
            drafted = self.block.draft(inputs, batch.block_table_tensor)
        step.draft_rows = len(inputs.input_ids)
        usable = np.zeros_like(step.limits)
        usable[inputs.requests] = [len(tokens) for tokens in drafted.tokens]
        lengths = self.lengths.choose(step, usable, drafted.confidence)
        for request, tokens in zip(inputs.requests.tolist(), drafted.tokens, strict=True):
            drafts[request] = tokens[: lengths[request]]
        self.has_drafts = bool(lengths.any())
        self.all_drafted = step.ids if plan.drafted.all() else ()
        return drafts

    def end_step(self) -> None:
        """The runner is done with a step, or had none."""
        step, self.step = self.step, None
        if step is not None:
            self.lengths.end(step)

    def clear_statistics(self) -> None:
        """Count from zero again."""
        self.lengths.statistics.clear()

    def collect_statistics(self, *, waits: bool = True) -> DraftStatistics:
        """What was counted so far; there is nothing to wait for."""
        return self.lengths.statistics

    def _persistent_buffers(self) -> list[torch.Tensor]:
        return [] if self.backlog is None else self.backlog.buffers()

    def _take_context(
        self,
        step: Step,
        positions: torch.Tensor,
        features: torch.Tensor,
        batch: CommonAttentionMetadata,
        num_rejected: Ints,
    ) -> None:
        slots = batch.slot_mapping[: len(features)]
        rows: slice | torch.Tensor
        if num_rejected[:-1].any():
            rows = torch.from_numpy(kept_rows(batch.query_start_loc_cpu.numpy(), num_rejected))
        else:  # what is kept is in one piece, so nothing need be copied
            rows = slice(len(features) - int(num_rejected[-1]))
        kept = features[rows], positions[rows], slots[rows]
        with step.timing("context"):
            if self.backlog is not None:
                goes_on = step.ids == self.all_drafted  # it would not wait for long
                take = self.backlog.store_new if goes_on else self.backlog.add
                step.context_rows = take(*kept)
            else:
                self.model.context.store(*kept)
                step.context_rows = len(kept[0])
