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

from dataclasses import replace

import numpy as np

from vllm_dflash.config.engine_options import EngineOptions
from vllm_dflash.engine.agreement import from_rank_0
from vllm_dflash.engine.block_layout import block_inputs, draft_limits
from vllm_dflash.engine.cadence import Cadence
from vllm_dflash.engine.reporting.statistics import DraftStatistics
from vllm_dflash.engine.step_clock import StepClock
from vllm_dflash.engine.v1.backlog import ContextBacklog
from vllm_dflash.engine.v1.block_forward import NO_BLOCKS, BlockDrafts, BlockForward
from vllm_dflash.engine.v1.target_batch import TargetBatch
from vllm_dflash.model.context_projection import ContextProjection
from vllm_dflash.planning.planner import Planner
from vllm_dflash.planning.step import StepRecord
from vllm_dflash.planning.texts import NgramIndex


class HostStep:
    """Drafts for one worker's batch in every step."""

    def __init__(
        self,
        options: EngineOptions,
        block: BlockForward,
        context: ContextProjection,
        page_size: int,
    ) -> None:
        """Start with fixed lengths and no free drafts; `page_size`: tokens per cache page."""
        self.width = options.draft_width
        """Maximum drafts of a block; a request can have more free drafts."""
        self.spec = options.drafter
        self.page_size = page_size
        self.block = block
        self.context = context
        self.planner = Planner(self.width, 1)
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
        self._since_plan = 0
        """Steps since the last new plan."""
        self._plan_seconds = 0.0
        """Time that the last new plan took, with learning before it."""
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
            self.free_drafts.forget(changed)

    def run(self, step: StepRecord, batch: TargetBatch) -> list[list[int]]:
        """Drafts of each request to verify next.

        `step` comes with `ids`, `produced`, `rows`, `context_lens` and `verified`, which counts all
        drafts, ours or not.
        """
        self._count_outcome(step)
        self._keep_context(step, batch)
        self._look_up(step, batch)
        step.max_drafts = draft_limits(
            step.context_lens, batch.block_limits, self.width, step.decoding
        )
        step.any_eligible = bool(step.max_drafts.any())
        if not self._repeat_plan(step):
            self._plan(step, batch)
        block = NO_BLOCKS
        if step.plan.width:
            self._catch_up(step, batch)
            block = self._run_block(step, batch)
        if step.plan.width or self._has_better_text(step):
            self._choose(step, block)
        return self._hand_over(step, block)

    def end(self, step: StepRecord) -> None:
        """Time a finished step, learn what it cost unless it repeated a plan, and count it."""
        self._clock.finish(step)
        if not step.repeats_plan:
            if step.target_seconds:  # a plan's time belongs to all steps that it holds for
                step.target_seconds -= self._plan_seconds * (1 - 1 / (1 + step.plan.holds_for))
            before = step.planning_seconds
            with step.timing("planning"):
                self.planner.record_step(step)
            learning = step.planning_seconds - before
            self._cadence.record_step(self._plan_seconds + learning, step.seconds)
        self.statistics.record_step(step)

    # --- the parts of a step, in their order ------------------------------------------------------

    def _count_outcome(self, step: StepRecord) -> None:
        """Count the results of our drafts only, and not if the sample was discarded."""
        if not step.verified.any():
            return
        ours = np.array([name in self._handed_over for name in step.ids])
        free = np.array([self._handed_over.get(name, False) for name in step.ids])
        step.verified = np.where(ours & step.decoding, step.verified, 0)
        step.verified_free = step.verified * free
        self.statistics.record_outcomes(step)

    def _keep_context(self, step: StepRecord, batch: TargetBatch) -> None:
        """Store the context of all rows that were not rejected, or add it to the backlog."""
        kept = batch.kept()
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

    def _repeat_plan(self, step: StepRecord) -> bool:
        """Repeat the last plan if it still holds, for the requests that can still use drafts."""
        self._since_plan += 1
        last = self._last.plan
        if step.ids != self._last.ids or self._since_plan > last.holds_for:
            return False
        drafted = last.drafted & (step.max_drafts > 0)
        if last.width and not drafted.any():
            return False
        step.plan, step.repeats_plan = replace(last, drafted=drafted), True
        return True

    def _plan(self, step: StepRecord, batch: TargetBatch) -> None:
        """Learn from the verified drafts, then plan which requests to draft and how wide; the same
        on every rank."""
        steps, self._since_plan, self._longest_useless = self._since_plan, 0, 0
        before = step.planning_seconds
        with step.timing("planning"):
            if self.planner.is_started:
                self.planner.learn_drafts(step)
            waiting = None
            if self.backlog is not None:
                table = batch.block_table.numpy()
                waiting = self.backlog.count(table, step.context_lens)
            plan = self.planner.plan(
                step.ids,
                step.context_lens,
                step.max_drafts,
                predicted=step.predicted,
                waiting=waiting,
                steps=steps,
            )
        self._plan_seconds = step.planning_seconds - before
        if not self.planner.is_started:
            step.plan = plan
            return
        if plan.is_probe:
            self._cadence.observe_next_steps()
        elif step.decoding.all():  # otherwise another request can be drafted with the next step
            plan = replace(plan, holds_for=self._cadence.interval() - 1)
        step.plan = from_rank_0(plan)

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
            self.spec.mask_token_id,
            batch.block_table.numpy(),
            self.page_size,
            self.spec.first_draft_row,
        )
        newest = batch.newest_features(inputs.requests) if self.block.reads_newest else None
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
        if self.planner.is_started:
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
