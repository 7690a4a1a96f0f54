"""V1's step: the host plans.

A step, behind the target's, top to bottom (`HostStep.run`):

    outcome   what became of the drafts that the step verified
    context   of the tokens that came to stay: stored, or kept waiting        (backlog.py)
    look up   what the requests' own texts predict                            (planning/texts.py)
    plan      whom to draft, and how wide                                     (planning/planner.py)
    block     the drafter: context that these wait for stored, blocks drafted (block_forward.py)
    choose    block or text, and how many of its drafts are to be verified    (planning/planner.py)
    hand over to the scheduler, as lists of tokens                            (message.py)

A plan without blocks holds for some steps, in which texts alone are looked up. `proposer.py`
takes from vLLM what a step needs: arrays and tensors.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from vllm_dflash.config.mode import Mode
from vllm_dflash.engine.agreement import from_rank_0
from vllm_dflash.engine.block_layout import block_inputs, draft_limits, kept_rows
from vllm_dflash.engine.reporting.statistics import DraftStatistics
from vllm_dflash.engine.step_clock import StepClock
from vllm_dflash.engine.v1.backlog import ContextBacklog
from vllm_dflash.engine.v1.block_forward import NO_BLOCKS, BlockDrafts, BlockForward
from vllm_dflash.model.context_projection import ContextProjection
from vllm_dflash.planning import Floats, Ints
from vllm_dflash.planning.planner import Planner
from vllm_dflash.planning.step import Plan, Step
from vllm_dflash.planning.texts import SuffixMatches, append_tokens


class TargetBatch(NamedTuple):
    """What the target ran, T rows of R requests, and what there is to draft them by."""

    features: torch.Tensor
    """Hidden states of the taps, [T, m * H]."""
    positions: torch.Tensor
    """[T]."""
    slots: torch.Tensor
    """Slots of the drafter's cache, [T]."""
    query_start_loc: Ints
    """First row of each request and the total, [R + 1]."""
    num_rejected: Ints
    """Rejected drafts, the last rows of each, [R]."""
    block_table: torch.Tensor
    """Cache blocks of each request, [R, most of any]."""
    sampled: Ints
    """Tokens that each was given, and -1 behind them, [R, most of any]."""
    bonus_ids: Ints
    """The newest of them, [R]."""
    texts: Ints
    """All tokens of each before those; they are written behind them, [R, longest] int32."""
    text_limits: Ints
    """Tokens that each may come to by its text, 0: it has none to look up, [R]."""
    block_limits: Ints
    """And by the drafter, [R]."""
    most_free: int
    """Free drafts of each at most, for which a step has room."""


class FixedLength:
    """`draft_length: "fixed"`, which stands in the planner's place: always K, or as many as a
    request can use."""

    is_same_everywhere = True
    """On all tensor-parallel ranks, by itself."""

    def __init__(self, max_draft: int) -> None:
        self.max_draft = max_draft

    def plan(self, step: Step) -> Plan:
        """Everybody who can use drafts."""
        width = min(self.max_draft, int(step.limits.max(initial=0)))
        return Plan(step.limits > 0, width, price=0.0, speedup=1.0)

    def lengths(self, step: Step, confidence: Floats) -> Ints:
        """All of them."""
        return np.minimum(step.limits, step.plan.width) * step.plan.drafted

    def observe(self, step: Step) -> None:
        """Expects nothing, and learns nothing."""


class HostStep:
    """Drafts of one worker, step by step."""

    def __init__(
        self,
        options: Mode,
        block: BlockForward,
        context: ContextProjection,
        block_size: int,
    ) -> None:
        """Fixed lengths and no free drafts, until told otherwise; `block_size` is the cache's."""
        self.width = options.draft_width
        """Drafts of a block at most; there may be more of free ones."""
        self.mask_token_id = options.drafter.mask_token_id
        self.block_size = block_size
        self.block = block
        self.context = context
        self.policy: Planner | FixedLength = FixedLength(self.width)
        self.texts: SuffixMatches | None = None
        """What gives free drafts, if anything does."""
        self.backlog: ContextBacklog | None = None
        """Without one, context is stored in every step."""
        self.statistics = DraftStatistics(self.width)
        self._clock = StepClock()
        self._handed_over: dict[str, bool] = {}
        """Requests that have drafts which are still to be verified, for they may have to wait for
        their turn; and whether their text predicted them."""
        self._last = Step((), np.zeros(0, np.int64))
        """The step before."""
        self._skip_steps = 0
        """How often nobody need be asked again, while the batch is the last one."""

    def expect(self, admitted: set[str], ended: set[str], texts: Ints) -> None:
        """A step is about to run, to which such requests come, whose drafts vLLM has dropped; and
        such have ended, whose texts are as they were at the last look-up."""
        for name in admitted | ended:
            self._handed_over.pop(name, None)
        if ended and self.texts is not None:
            self.texts.end(ended, texts)

    def run(self, step: Step, batch: TargetBatch) -> list[list[int]]:
        """What each request of the batch is to have verified next. The step knows its `ids`,
        `produced`, `rows`, `context_lens`, and how many drafts it `verified`, ours or not."""
        self._take_outcome(step)
        self._keep_context(step, batch)
        self._take_skip(step)
        self._look_up(step, batch)
        if not step.is_resting:
            self._limit(step, batch)
        block = NO_BLOCKS
        if not step.is_resting or step.predicted is not None:
            self._plan(step)
            if step.plan.width:
                self._catch_up(step, batch)
                block = self._run_block(step, batch)
            if step.plan.width or step.plan.uses_text:
                self._choose(step, block)
        return self._hand_over(step, block)

    def end(self, step: Step) -> None:
        """The runner is done with a step: time it, learn from it, count it."""
        # A step that verified drafts is unlike the undrafted ones that may follow it.
        is_skipping = self._skip_steps > 0 and not step.verified.any()
        held = self._clock.finish(step, hold=is_skipping)
        if held is not None:
            self.statistics.compare(held, self.policy.observe(held))
        with step.timing("planning"):
            estimate = self.policy.observe(step)
        self.statistics.observe(step, estimate)

    # --- the parts of a step, in their order ------------------------------------------------------

    def _take_outcome(self, step: Step) -> None:
        """What became of our drafts; a discarded sample says nothing of them."""
        if not step.verified.any():
            return
        ours = np.array([name in self._handed_over for name in step.ids])
        free = np.array([self._handed_over.get(name, False) for name in step.ids])
        step.verified = np.where(ours & step.decoding, step.verified, 0)
        step.verified_free = step.verified * free
        self.statistics.observe_verification(step)

    def _keep_context(self, step: Step, batch: TargetBatch) -> None:
        """Keep the context of all rows that the target did not reject."""
        rows: slice | torch.Tensor
        if batch.num_rejected[:-1].any():
            rows = torch.from_numpy(kept_rows(batch.query_start_loc, batch.num_rejected))
        else:  # what is kept is in one piece, so nothing need be copied
            rows = slice(len(batch.features) - int(batch.num_rejected[-1]))
        kept = batch.features[rows], batch.positions[rows], batch.slots[rows]
        with step.timing("context"):
            if self.backlog is None:
                self.context.store(*kept)
                step.context_rows = len(kept[0])
                return
            # While all are drafted step after step, it would not wait for long.
            goes_on = step.ids == self._last.ids and self._last.plan.drafted.all()
            take = self.backlog.store_new if goes_on else self.backlog.add
            step.context_rows = take(*kept)

    def _take_skip(self, step: Step) -> None:
        """An earlier plan may have said that nobody is drafted in this step either."""
        if not self._skip_steps or step.ids != self._last.ids:
            self._skip_steps = 0
            return
        self._skip_steps -= 1
        step.plan = Plan.nothing(step.num_requests)
        step.could_draft = self._last.could_draft
        step.is_resting = True

    def _look_up(self, step: Step, batch: TargetBatch) -> None:
        """What texts predict, and what became of what they predicted before."""
        if self.texts is None:
            return
        with step.timing("planning"):
            texts, lens, produced = batch.texts, step.context_lens, step.produced
            # The runner will write the same ones. Other types would be compiled for.
            append_tokens(texts, lens, batch.sampled.astype(np.int32, copy=False), produced)
            found = self.texts.look_up(
                step.ids, texts, lens, produced, batch.text_limits, batch.most_free
            )
        if found.lengths.any() or found.known.any():
            step.predicted = found

    def _limit(self, step: Step, batch: TargetBatch) -> None:
        """How many drafts of a block each can use, and how much context waits for them."""
        step.limits = draft_limits(step.context_lens, batch.block_limits, self.width, step.decoding)
        step.could_draft = bool(step.limits.any())
        if self.backlog is not None:
            with step.timing("planning"):
                table = batch.block_table.numpy()
                step.waiting = self.backlog.count(table, step.context_lens)

    def _plan(self, step: Step) -> None:
        """Whom to draft and how wide, on every rank alike."""
        with step.timing("planning"):
            plan = self.policy.plan(step)
        step.plan = plan if self.policy.is_same_everywhere else from_rank_0(plan)
        if not step.plan.width and not step.is_resting:
            self._skip_steps = step.plan.skip_steps

    def _catch_up(self, step: Step, batch: TargetBatch) -> None:
        """Store the context for which the requests that are drafted wait."""
        if self.backlog is None:
            return
        drafted = step.plan.drafted
        with step.timing("context"):
            table = batch.block_table.numpy()[drafted]
            step.context_rows += self.backlog.store(table, step.context_lens[drafted])

    def _run_block(self, step: Step, batch: TargetBatch) -> BlockDrafts:
        """Blocks of all requests that are drafted, in one forward of the drafter."""
        inputs = block_inputs(
            step.context_lens,
            np.minimum(step.limits, step.plan.width) * step.plan.drafted,
            batch.bonus_ids,
            self.mask_token_id,
            batch.block_table.numpy(),
            self.block_size,
        )
        newest = None
        if self.block.reads_newest:
            last_rows = batch.query_start_loc[1:] - batch.num_rejected - 1
            newest = batch.features[torch.from_numpy(last_rows[inputs.requests])]
        with step.timing("draft"):
            block = self.block.draft(inputs, batch.block_table, newest)
        step.draft_rows = len(inputs.input_ids)
        return block

    def _choose(self, step: Step, block: BlockDrafts) -> None:
        """Choose what drafts each request, and how many tokens, on every rank alike."""
        drafted, usable = step.plan.drafted, np.zeros_like(step.limits)
        usable[block.requests] = [len(tokens) for tokens in block.tokens]
        step.nan_drafts = int(np.minimum(step.limits, step.plan.width)[drafted].sum())
        step.nan_drafts -= int(usable.sum())
        step.limits = usable
        if step.plan.uses_text:
            self._compare(step, block)
        with step.timing("planning"):
            step.lengths = self.policy.lengths(step, block.confidence)
        if not self.policy.is_same_everywhere:
            step.lengths, step.from_text = from_rank_0((step.lengths, step.from_text))

    def _compare(self, step: Step, block: BlockDrafts) -> None:
        """How far blocks say what their requests' texts do, too."""
        assert self.texts is not None
        assert step.predicted is not None
        for request, drafts in zip(block.requests.tolist(), block.tokens, strict=True):
            length = min(int(step.predicted.lengths[request]), len(drafts))
            differ = np.array(drafts[:length]) != self.texts.tokens(request, length)
            step.agreed[request] = differ.argmax() if differ.any() else length

    def _hand_over(self, step: Step, block: BlockDrafts) -> list[list[int]]:
        """To the scheduler, and to the memory of the next step."""
        drafts: list[list[int]] = [[] for _ in step.ids]
        for request, tokens in zip(block.requests.tolist(), block.tokens, strict=True):
            drafts[request] = tokens[: step.lengths[request]]
        for request in np.flatnonzero(step.from_text & (step.lengths > 0)).tolist():
            assert self.texts is not None
            drafts[request] = self.texts.tokens(request, int(step.lengths[request]))
        if self._handed_over:
            for name in step.ids:
                self._handed_over.pop(name, None)
        for request in np.flatnonzero(step.lengths).tolist():
            self._handed_over[step.ids[request]] = bool(step.from_text[request])
        self._last = step
        return drafts
