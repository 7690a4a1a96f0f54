"""The drafting part of a step on V1, planned on the host.

After the target, in order (`HostStep.run`):

    outcome    count which of our drafts were verified and accepted
    context    store the context of rows not rejected, or let it wait    (backlog.py)
    look up    find free drafts                                          (planning/texts.py)
    plan       which requests to draft, and how wide                     (planning/planner.py)
    block      store context that these requests wait for, draft blocks  (block_forward.py)
    choose     block or free drafts, and how many of them to verify      (planning/planner.py)
    hand over  drafts to the scheduler, as lists of tokens               (message.py)

A plan also applies to the next few steps, if planning takes long beside them (`cadence.py`).
`proposer.py` gets a step's inputs, arrays and tensors, from vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from vllm_dflash.config.engine_options import EngineOptions
from vllm_dflash.engine.agreement import from_rank_0
from vllm_dflash.engine.block_layout import block_inputs, draft_limits, kept_rows
from vllm_dflash.engine.cadence import SOON, Cadence
from vllm_dflash.engine.reporting.statistics import DraftStatistics
from vllm_dflash.engine.step_clock import StepClock
from vllm_dflash.engine.v1.backlog import ContextBacklog
from vllm_dflash.engine.v1.block_forward import NO_BLOCKS, BlockDrafts, BlockForward
from vllm_dflash.model.context_projection import ContextProjection
from vllm_dflash.planning import Bools, Floats, Ints
from vllm_dflash.planning.planner import Planner
from vllm_dflash.planning.step import Plan, StepRecord
from vllm_dflash.planning.texts import NgramIndex


class TargetBatch(NamedTuple):
    """Inputs for drafting after the target ran T rows of R requests."""

    features: torch.Tensor
    """Hidden states of the taps, [T, m * H]."""
    positions: torch.Tensor
    """[T]."""
    slots: torch.Tensor
    """Slots of the drafter's cache, [T]."""
    query_start_loc: Ints
    """First row of each request, then the total, [R + 1]."""
    num_rejected: Ints
    """Rejected drafts of each request, which are its last rows, [R]."""
    block_table: torch.Tensor
    """Cache blocks of each request, [R, most of any]."""
    sampled: Ints
    """Tokens that each request got, then -1, [R, most of any]."""
    bonus_ids: Ints
    """Newest token of each request, [R]."""
    texts: Ints
    """All tokens of each request but `sampled`, [R or more, longest] int32."""
    text_limits: Ints
    """Maximum length of each request with free drafts, [R]; 0: it has no text to look up."""
    block_limits: Ints
    """Maximum length of each request with drafts of a block, [R]."""
    most_free: int
    """Maximum number of free drafts per request that a step has room to verify."""


class FixedLength:
    """Replacement for the planner with `draft_length: "fixed"`: always K drafts, or as many as a
    request can use."""

    agrees_across_ranks = True
    """Whether all tensor-parallel ranks get the same plan without exchanging it."""

    def __init__(self, max_draft: int) -> None:
        self.max_draft = max_draft

    def plan(self, ids: Sequence[str], context_lens: Ints, max_drafts: Ints, **_: object) -> Plan:
        """Draft for every request that can use drafts."""
        width = min(self.max_draft, int(max_drafts.max(initial=0)))
        return Plan(max_drafts > 0, width)

    def choose(self, step: StepRecord, confidence: Floats) -> tuple[Ints, Bools]:
        """Verify all drafts of the blocks."""
        lengths = np.minimum(step.max_drafts, step.plan.width) * step.plan.drafted
        return lengths, np.zeros(len(lengths), bool)

    def learn_drafts(self, step: StepRecord) -> None:
        """Do nothing."""

    def record_step(self, step: StepRecord) -> None:
        """Do nothing: no estimate, and nothing to learn."""


class HostStep:
    """Drafts for one worker's batch in every step."""

    def __init__(
        self,
        options: EngineOptions,
        block: BlockForward,
        context: ContextProjection,
        block_size: int,
    ) -> None:
        """Start with fixed lengths and no free drafts; `block_size`: tokens per cache block."""
        self.width = options.draft_width
        """Maximum drafts of a block; a request can have more free drafts."""
        self.mask_token_id = options.drafter.mask_token_id
        self.first_draft_row = options.drafter.first_draft_row
        self.block_size = block_size
        self.block = block
        self.context = context
        self.planner: Planner | FixedLength = FixedLength(self.width)
        self.free_drafts: NgramIndex | None = None
        """Source of free drafts; None: no free drafts."""
        self.backlog: ContextBacklog | None = None
        """None: context is stored in every step."""
        self.statistics = DraftStatistics(self.width)
        self._clock = StepClock()
        self._handed_over: dict[str, bool] = {}
        """Requests whose drafts are still to be verified, and whether these are free drafts. The
        scheduler may make a request wait for several steps."""
        self._last = StepRecord((), np.zeros(0, np.int64))
        """The previous step."""
        self._cadence = Cadence()
        self._skip_steps = self._since_plan = self._watched_steps = 0
        """Number of next steps that need no new plan, as long as the batch stays the same; of those
        since the last new one; and of those to plan in any case, after a probe."""
        self._plan_seconds = 0.0
        """Time that the last new plan took."""
        self._longest_useless = 0
        """Longest match of a text, in tokens, that did not pay under the present plan."""

    def begin_step(self, admitted: set[str], ended: set[str]) -> None:
        """Prepare for a step that is about to run.

        `admitted` join or resume in this step: vLLM has dropped their drafts. `ended` have ended.
        """
        changed = admitted | ended
        for name in changed:
            self._handed_over.pop(name, None)
        if self.free_drafts is not None:
            self.free_drafts.restart(changed)

    def run(self, step: StepRecord, batch: TargetBatch) -> list[list[int]]:
        """Drafts of each request to verify next.

        `step` comes with `ids`, `produced`, `rows`, `context_lens` and `verified`, which counts all
        drafts, ours or not.
        """
        self._count_outcome(step)
        self._keep_context(step, batch)
        self._look_up(step, batch)
        self._repeat_plan(step)
        self._limit(step, batch)
        if not step.repeats_plan:
            self._plan(step)
        block = NO_BLOCKS
        if step.plan.width:
            self._catch_up(step, batch)
            block = self._run_block(step, batch)
        if step.plan.width or self._has_better_text(step):
            self._choose(step, block)
        return self._hand_over(step, block)

    def end(self, step: StepRecord) -> None:
        """Time a finished step, learn from it, and count it."""
        # A step that verified drafts differs from the undrafted steps that may follow it.
        is_skipping = self._skip_steps > 0 and not step.verified.any()
        held = self._clock.finish(step, hold=is_skipping)
        if held is not None:
            self.statistics.compare(held, self.planner.record_step(held))
        estimate = None
        if not (step.repeats_plan and step.verified.any()):  # others are the mean of held ones
            with step.timing("planning"):
                estimate = self.planner.record_step(step)
        if not step.repeats_plan:
            self._cadence.record_times(self._plan_seconds, step.seconds)
        self.statistics.count_step(step, estimate)

    # --- the parts of a step, in their order ------------------------------------------------------

    def _count_outcome(self, step: StepRecord) -> None:
        """Count the results of our drafts only, and not if the sample was discarded."""
        if not step.verified.any():
            return
        ours = np.array([name in self._handed_over for name in step.ids])
        free = np.array([self._handed_over.get(name, False) for name in step.ids])
        step.verified = np.where(ours & step.decoding, step.verified, 0)
        step.verified_free = step.verified * free
        self.statistics.count_verification(step)

    def _keep_context(self, step: StepRecord, batch: TargetBatch) -> None:
        """Store the context of all rows that were not rejected, or add it to the backlog."""
        rows: slice | torch.Tensor
        if batch.num_rejected[:-1].any():
            rows = torch.from_numpy(kept_rows(batch.query_start_loc, batch.num_rejected))
        else:  # the kept rows are contiguous, so no copy is needed
            rows = slice(len(batch.features) - int(batch.num_rejected[-1]))
        kept = batch.features[rows], batch.positions[rows], batch.slots[rows]
        with step.timing("context"):
            if self.backlog is None:
                self.context.store(*kept)
                step.context_rows = len(kept[0])
                return
            # If all requests are drafted in every step, context would not wait long.
            goes_on = step.ids == self._last.ids and self._last.plan.drafted.all()
            take = self.backlog.store_new if goes_on else self.backlog.add
            step.context_rows = take(*kept)

    def _look_up(self, step: StepRecord, batch: TargetBatch) -> None:
        """Look up free drafts, and how many tokens of the last look-up were right."""
        if self.free_drafts is None:
            return
        with step.timing("planning"):
            found = self.free_drafts.look_up(
                step, batch.texts, batch.sampled, batch.text_limits, batch.most_free
            )
        if found.lengths.any() or found.num_observed.any():
            step.predicted = found

    def _repeat_plan(self, step: StepRecord) -> None:
        """Repeat the last plan if it still holds; else learn from the drafts that were verified."""
        self._since_plan += 1
        if self._skip_steps and step.ids == self._last.ids:
            self._skip_steps -= 1
            step.plan = replace(self._last.plan, is_probe=False)
            step.repeats_plan = True
            return
        self._learn(step)

    def _learn(self, step: StepRecord) -> None:
        """Learn from the drafts that were verified, before a new plan."""
        self._skip_steps, before = 0, step.planning_seconds
        with step.timing("planning"):
            self.planner.learn_drafts(step)
        self._plan_seconds = step.planning_seconds - before

    def _limit(self, step: StepRecord, batch: TargetBatch) -> None:
        """Find how many drafts of a block each request can use, and its waiting context."""
        if step.repeats_plan and not step.plan.width:
            step.any_eligible = self._last.any_eligible
            return
        step.max_drafts = draft_limits(
            step.context_lens, batch.block_limits, self.width, step.decoding
        )
        step.any_eligible = bool(step.max_drafts.any())
        if step.repeats_plan:  # requests that have come to their end are not drafted any more
            step.plan = replace(step.plan, drafted=step.plan.drafted & (step.max_drafts > 0))
            if not step.plan.drafted.any():
                step.repeats_plan = False
                self._learn(step)
        if not step.repeats_plan and self.backlog is not None:
            with step.timing("planning"):
                table = batch.block_table.numpy()
                step.waiting = self.backlog.count(table, step.context_lens)

    def _plan(self, step: StepRecord) -> None:
        """Plan which requests to draft and how wide; the same on every rank."""
        steps, self._since_plan, before = self._since_plan, 0, step.planning_seconds
        with step.timing("planning"):
            plan = self.planner.plan(
                step.ids,
                step.context_lens,
                step.max_drafts,
                predicted=step.predicted,
                waiting=step.waiting,
                steps=steps,
            )
        self._plan_seconds += step.planning_seconds - before
        if plan.is_probe:
            self._watched_steps = SOON
        elif self._watched_steps:
            self._watched_steps -= 1
        elif step.decoding.all() and not self.planner.agrees_across_ranks:
            # Otherwise another request can be drafted with the next step, or there is no clock.
            plan = replace(plan, holds_for=self._cadence.interval() - 1)
        step.plan = plan if self.planner.agrees_across_ranks else from_rank_0(plan)
        self._skip_steps, self._longest_useless = step.plan.holds_for, 0

    def _catch_up(self, step: StepRecord, batch: TargetBatch) -> None:
        """Store the waiting context of the requests to draft."""
        if self.backlog is None:
            return
        drafted = step.plan.drafted
        with step.timing("context"):
            table = batch.block_table.numpy()[drafted]
            step.context_rows += self.backlog.store(table, step.context_lens[drafted])

    def _run_block(self, step: StepRecord, batch: TargetBatch) -> BlockDrafts:
        """Draft the blocks of all planned requests in one forward pass of the drafter."""
        inputs = block_inputs(
            step.context_lens,
            np.minimum(step.max_drafts, step.plan.width) * step.plan.drafted,
            batch.bonus_ids,
            self.mask_token_id,
            batch.block_table.numpy(),
            self.block_size,
            self.first_draft_row,
        )
        newest = None
        if self.block.reads_newest:
            last_rows = batch.query_start_loc[1:] - batch.num_rejected - 1
            newest = batch.features[torch.from_numpy(last_rows[inputs.requests])]
        with step.timing("draft"):
            block = self.block.draft(inputs, batch.block_table, newest)
        step.draft_rows = len(inputs.input_ids)
        return block

    def _has_better_text(self, step: StepRecord) -> bool:
        """Return whether a text matches further than those that did not pay since the last plan."""
        found = step.predicted
        return found is not None and found.longest_match > self._longest_useless

    def _choose(self, step: StepRecord, block: BlockDrafts) -> None:
        """Choose block or free drafts for each request, and how many; the same on every rank."""
        drafted, usable = step.plan.drafted, np.zeros_like(step.max_drafts)
        usable[block.requests] = [len(tokens) for tokens in block.tokens]
        step.nan_drafts = int(np.minimum(step.max_drafts, step.plan.width)[drafted].sum())
        step.nan_drafts -= int(usable.sum())
        step.max_drafts = usable
        with step.timing("planning"):
            step.lengths, step.from_text = self.planner.choose(step, block.confidence)
        if not self.planner.agrees_across_ranks:
            step.lengths, step.from_text = from_rank_0((step.lengths, step.from_text))
        if step.predicted is not None and not step.lengths.any():
            self._longest_useless = step.predicted.longest_match

    def _hand_over(self, step: StepRecord, block: BlockDrafts) -> list[list[int]]:
        """Return the drafts for the scheduler, and remember which requests have some."""
        drafts: list[list[int]] = [[] for _ in step.ids]
        for request, tokens in zip(block.requests.tolist(), block.tokens, strict=True):
            drafts[request] = tokens[: step.lengths[request]]
        for request in np.flatnonzero(step.from_text & (step.lengths > 0)).tolist():
            assert self.free_drafts is not None
            drafts[request] = self.free_drafts.tokens(request, int(step.lengths[request]))
        if self._handed_over:
            for name in step.ids:
                self._handed_over.pop(name, None)
        for request in np.flatnonzero(step.lengths).tolist():
            self._handed_over[step.ids[request]] = bool(step.from_text[request])
        self._last = step
        return drafts
