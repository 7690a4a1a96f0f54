"""The proposer for vLLM's V1 model runner: context is kept, drafts are made where they pay."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_dflash.engine.block_layout import (
    block_inputs,
    bonus_tokens,
    draft_limits,
    kept_rows,
    length_limits,
    room_for_long_drafts,
)
from vllm_dflash.engine.padding import have_own_drafts, newly_admitted
from vllm_dflash.engine.reporting.statistics import DraftStatistics
from vllm_dflash.engine.v1.backlog import ContextBacklog
from vllm_dflash.engine.v1.branching import may_branch
from vllm_dflash.engine.v1.draft_trees import DraftTrees
from vllm_dflash.engine.v1.length_control import NO_CONFIDENCE, LengthControl
from vllm_dflash.engine.v1.loaded_drafter import LoadedDrafter
from vllm_dflash.engine.v1.text_drafts import TextDrafts
from vllm_dflash.engine.warm import WarmState
from vllm_dflash.planning import Ints
from vllm_dflash.planning.costs import StepCosts
from vllm_dflash.planning.planner import Planner
from vllm_dflash.planning.step import Candidates, Step


class PlannedProposer(LoadedDrafter):
    """Drafts a block per request in one forward, in the place of vLLM's own proposer.

    Every step: take the context of all scheduled tokens the target did not reject, then draft
    for the requests for which the plan says so, and take what others' texts predict. Where
    lengths are planned and nobody is drafted, nothing is computed, and context is stored now and
    then.

    Written for synchronous scheduling, which is what the V1 runner does on CPUs: the ragged
    lists it returns tell the scheduler each request's length.
    """

    trees: DraftTrees | None = None
    """Those that wait to be verified, if drafts may be trees."""

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, runner: GPUModelRunner
    ) -> None:
        super().__init__(vllm_config, device, runner)
        self.lengths = LengthControl(self.width)
        self.texts: TextDrafts | None = None
        """What gives free drafts, if anything does."""
        self.backlog: ContextBacklog | None = None
        """Without one, context is stored in every step."""
        self.warm = WarmState(self._persistent_buffers)
        self.step: Step | None = None
        """The one that runs, from when the target's output is there."""
        self.all_drafted: Sequence[str] = ()
        """The last batch, if all of it was drafted."""
        self.has_drafts = False
        """Whether any draft of the last step is to be verified."""
        self._sampled = np.zeros((0, 1), np.int32)
        """What this step sampled, [R, most of any]."""
        self.newly_admitted: Collection[str] = ()
        """Requests whose drafts in this step are vLLM's placeholders."""

    def adapt_lengths(self, costs: StepCosts) -> None:
        """From now on plan draft lengths, starting from these costs."""
        most_free = self.options.most_free
        self.lengths.policy = Planner(self.width, self.max_batch_size, costs, most_free=most_free)
        if most_free:
            sizes = self.max_batch_size, self.runner.max_model_len, most_free
            self.texts = TextDrafts(*sizes, shares_outputs=self.options.shares_outputs)
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

    def expect(self, step: SchedulerOutput) -> None:
        """A step is about to run."""
        self.newly_admitted = newly_admitted(step)
        if self.texts is not None:
            self.texts.end(step.finished_req_ids)

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
        num_requests, self._sampled = len(sampled_token_ids), sampled_token_ids.numpy()
        bonus, produced = bonus_tokens(
            self._sampled,
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
        step, produced = self.step, self.step.produced
        tells = (produced > 0) & have_own_drafts(step.ids, self.newly_admitted)
        step.verified = np.where(tells, drafted, 0)  # a discarded sample says nothing
        if self.trees is not None:
            step.likeliest = self.trees.fate(self._sampled, produced)
        self.lengths.observe_verification(step)
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
            num_speculative_tokens: drafts of a request at most.
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
        self.all_drafted = ()
        context_lens = batch.seq_lens[: batch.num_reqs].numpy() - num_rejected
        step.context_lens = context_lens.astype(np.int64)
        drafted = self._draft(step, batch, next_token_ids)
        drafts: list[list[int]] = [[] for _ in step.ids]
        for request in np.nonzero(step.lengths)[0].tolist():
            length = int(step.lengths[request])
            if step.from_text[request] and self.texts is not None:
                drafts[request] = self.texts.tokens(request, length)
            else:
                drafts[request] = drafted[request][:length]
        self.has_drafts = bool(step.lengths.any())
        return drafts

    def _draft(
        self, step: Step, batch: CommonAttentionMetadata, bonus_ids: torch.Tensor
    ) -> dict[int, list[int]]:
        """Plan the next step's drafts, make those of the drafter, and choose how many to verify.

        Returns:
            The drafter's, by request of the batch.
        """
        ends = length_limits(self.runner.requests, step.ids, self.runner.max_model_len)
        resting = self.lengths.take_skip(step)
        if self.texts is not None:
            with step.timing("planning"):
                texts, ends_of_texts = self.runner.input_batch, ends.copy()
                # A prompt of embeddings has no tokens; what lies there was another request's.
                ends_of_texts[list(texts.req_prompt_embeds)] = 0
                self.texts.look_up(
                    step,
                    texts.token_ids_cpu,
                    np.arange(step.num_requests),
                    ends_of_texts,
                    self._sampled.astype(np.int32, copy=False),  # not written down yet
                    self._room_for_long_drafts(),
                )
        if resting and step.predicted is None:
            return {}

        context_lens, block_table = step.context_lens, batch.block_table_tensor.numpy()
        if not resting:
            ends = np.minimum(ends, self.length_limit)
            step.limits = draft_limits(context_lens, ends, self.width, step.decoding)
            if self.backlog is not None:
                with step.timing("planning"):
                    step.waiting = self.backlog.count(block_table, context_lens)
        plan = self.lengths.plan(step)
        if not plan.width:
            if plan.uses_text:
                self.lengths.choose(step, np.zeros_like(step.limits), NO_CONFIDENCE)
            return {}
        if self.backlog is not None:
            with step.timing("context"):
                step.context_rows += self.backlog.store(
                    block_table[plan.drafted], context_lens[plan.drafted]
                )
        inputs = block_inputs(
            context_lens,
            np.minimum(step.limits, plan.width) * plan.drafted,
            bonus_ids.numpy(),
            self.spec.mask_token_id,
            block_table,
            self.block_size,
        )
        with step.timing("draft"):
            drafted = self.block.draft(inputs, batch.block_table_tensor)
        step.draft_rows = len(inputs.input_ids)
        usable = np.zeros_like(step.limits)
        usable[inputs.requests] = [len(tokens) for tokens in drafted.tokens]
        if self.texts is not None and plan.uses_text:
            self.texts.compare(step, inputs.requests, drafted.tokens)
        if self.trees is not None:
            assert drafted.others is not None
            names = [step.ids[each] for each in inputs.requests]
            branching = [may_branch(self.runner.requests[name].sampling_params) for name in names]
            # A chain of a block has room in any case.
            room = max(self._room_for_long_drafts(), self.width)
            budget = min(self.trees.budget, room)
            step.candidates = Candidates(*drafted.others, np.array(branching), budget)
        self.lengths.choose(step, usable, drafted.confidence)
        self.all_drafted = step.ids if plan.drafted.all() else ()
        tokens = drafted.tokens if self.trees is None else self.trees.keep(step)
        return dict(zip(inputs.requests.tolist(), tokens, strict=True))

    def _room_for_long_drafts(self) -> int:
        budget = self.vllm_config.scheduler_config.max_num_batched_tokens
        return room_for_long_drafts(budget, len(self.runner.requests), self.width)

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
        if self.trees is not None and self.trees.step is not None:
            features = features[torch.from_numpy(self.trees.step.order(len(features)))]
        kept = features[rows], positions[rows], slots[rows]
        with step.timing("context"):
            if self.backlog is not None:
                goes_on = step.ids == self.all_drafted  # it would not wait for long
                take = self.backlog.store_new if goes_on else self.backlog.add
                step.context_rows = take(*kept)
            else:
                self.model.context.store(*kept)
                step.context_rows = len(kept[0])
