"""The planner: whom to draft, how wide, and what of it to verify.

Every step it maximises expected tokens per second. A batch of R requests yields R tokens in any
case; drafting yields more of them in a longer step. Before drafting, `plan` weighs what drafts
have brought lately against what the step would cost, and may leave out some requests, or all.
After drafting, `lengths` cuts each block where its tokens are no longer worth their time.

Neither looks at a token that was sampled for the draft's position, only at the drafter's
distribution and at what became of earlier drafts. So the output distribution is that of verifying
any drafts (arXiv 2211.17192, section 3.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vllm_dflash.planning import Floats, Ints
from vllm_dflash.planning.chances import (
    AGREEMENT,
    Chances,
    expect,
    expect_texts,
    follow_texts,
    learn_blocks,
)
from vllm_dflash.planning.costs import StepCosts
from vllm_dflash.planning.estimates import Estimates
from vllm_dflash.planning.forecast import Forecast
from vllm_dflash.planning.probing import ProbeSchedule
from vllm_dflash.planning.request_rows import RequestRows
from vllm_dflash.planning.search import (
    Batch,
    Choice,
    Drafts,
    Undrafted,
    best_choice,
    best_undrafted,
    choose_lengths,
)
from vllm_dflash.planning.step import Plan, Step, StepEstimate

MARGIN = 1.01
"""Drafting must promise this much more than plain decoding, whose cost is known better."""
CLOSE = 0.95
"""From this speed-up on, drafting nearly pays, and is looked at more often."""
PROBE_SHARE = 16
"""A probe drafts one request, and one more for so many in the batch."""
PROBE_LENGTH = 3
"""Drafts a probe has verified whatever they seem worth, to see whether estimates still hold."""
SKIP_STEPS, CLOSE_SKIP_STEPS = 7, 1
"""Undrafted steps between two that are planned: planning is to cost next to nothing where it says
no. What texts predict is looked at in between, too."""


NO_CURVES: Floats = np.zeros((0, 0))
NO_SCORES: Floats = np.zeros(0)


class Planner:
    """State and decisions of one worker."""

    is_same_everywhere = False  # it goes by measured times

    def __init__(
        self, max_draft: int, max_requests: int, costs: StepCosts, *, most_free: int = 0
    ) -> None:
        """Plan for blocks of up to `max_draft` tokens (K) a request, and `max_requests` a batch.

        Where texts are looked up, for up to `most_free` free drafts of each (F).
        """
        self.max_draft = max_draft
        self.costs = costs
        # Twice the batch: requests that wait to be run again keep what is known of them.
        num_rows = 2 * max_requests
        self.forecast = Forecast(max_draft, num_rows)
        self.probes = ProbeSchedule()
        self.blocks = Chances.of(max_draft, num_rows)
        self.texts = Chances.of(most_free, num_rows)
        self._requests = RequestRows(num_rows)
        self._text_curves: Floats = np.zeros((0, most_free))
        """Survival of what the text of each request of this step predicts, [R, F] or [0, F]."""
        self._has_blocks = False
        """Whether drafts of blocks are to be verified."""
        self._row_seconds = 0.0
        self._probe_charge = 0.0
        """Seconds that the last probe was taken to cost."""

    def _rows(self, ids: Sequence[str]) -> Ints:
        rows, fresh = self._requests.of(ids)
        if len(fresh):
            self.forecast.forget(fresh)
            self.blocks.forget(fresh)
            self.texts.forget(fresh)
        return rows

    def plan(self, step: Step) -> Plan:
        """Learn what became of the drafts that the step verified, then say whom it drafts.

        Reads the step's `ids`, `verified`, `produced`, `limits`, `waiting` and `predicted`.
        """
        rows = self._rows(step.ids)
        self._learn(rows, step)
        texts = self._text_curves[:0]
        if step.predicted is not None:
            texts = follow_texts(self.texts, rows, step.verified, step.predicted)
        self._text_curves = texts
        scores = NO_SCORES if step.is_resting else self.forecast.scores(rows)
        batch = Batch(scores, step.limits, step.waiting, step.context_lens, texts)
        undrafted = best_undrafted(self.costs.records, batch)
        self._row_seconds = undrafted.row_seconds
        if step.is_resting or not step.limits.any():
            return _resting(step, undrafted)
        summary = self.forecast.summary
        best = best_choice(self.costs.records, batch, summary, undrafted, self.max_draft)
        return self._weigh(step, undrafted, best, uses_text=len(texts) > 0)

    def _learn(self, rows: Ints, step: Step) -> None:
        if self._has_blocks:
            learn_blocks(self.blocks, rows, step.verified, step.accepted)
            self._has_blocks = False

    def _weigh(self, step: Step, undrafted: Undrafted, best: Choice, *, uses_text: bool) -> Plan:
        """The best choice if it pays, and else a probe from time to time."""
        rate, tokens = best.rate, best.tokens
        gain, speedup = rate / undrafted.rate, rate / undrafted.plain_rate
        plan = Plan(best.drafted, best.width, rate, speedup=speedup, uses_text=uses_text)
        if gain > MARGIN:
            self.probes.restart()
            return plan
        skip_steps = CLOSE_SKIP_STEPS if gain > CLOSE else SKIP_STEPS
        resting = _resting(step, undrafted)
        # A prompt may end with the next step, and another request can be drafted then. And free
        # drafts that are better than the drafter's may be gone by then.
        is_displaced = resting.uses_text and rate > MARGIN * undrafted.plain_rate
        if is_displaced or not step.decoding.all():
            skip_steps = 0
        probe, seconds = self._cheapest_probe(step)
        # What the best plan loses if it is right; and a probe catches up for itself alone.
        lost = tokens / rate - tokens / undrafted.rate
        lost += self.costs.context.at_one(step.waiting[best.drafted].sum())
        undrafted_seconds = (1 + skip_steps) * undrafted.plain_seconds
        self._probe_charge = min(lost, seconds)
        if not self.probes.is_due(undrafted_seconds, self._probe_charge, is_close=gain > CLOSE):
            return replace(resting, skip_steps=skip_steps)
        if lost < seconds:
            probe = replace(probe, drafted=best.drafted, width=best.width, least=0)
        return replace(
            probe, price=resting.price, speedup=resting.speedup, uses_text=resting.uses_text
        )

    def _cheapest_probe(self, step: Step) -> tuple[Plan, float]:
        """Draft a few requests with little to catch up, to see what comes of it; and the seconds
        that this takes."""
        able = np.flatnonzero(step.limits)
        width = min(int(step.limits.max()), self.max_draft)
        count, num_requests = (
            min(len(able), 1 + step.num_requests // PROBE_SHARE),
            step.num_requests,
        )
        chosen = able[np.argsort(step.waiting[able], kind="stable")[:count]]
        drafted = np.zeros(num_requests, bool)
        drafted[chosen] = True
        context, rows = float(step.context_lens[chosen].sum()), count * PROBE_LENGTH
        both = np.array([num_requests, num_requests + rows])
        plain, verifying = self.costs.decoding(num_requests, both, 0.0, context / count).tolist()
        seconds = self.costs.block(count * (1 + width), context) + verifying - plain
        seconds += self.costs.context.at_one(step.waiting[chosen].sum())
        return Plan(drafted, width, 0.0, 1.0, is_probe=True, least=PROBE_LENGTH), seconds

    def lengths(self, step: Step, confidence: Floats) -> Ints:
        """How many drafts of each request to verify, [R]. Writes the step's `from_text`.

        Args:
            step: with its plan; `limits` of the drafted requests, [R], and what they `agreed` on.
            confidence: probability of each drafted token under the drafter, [D, w].
        """
        plan, rows = step.plan, self._rows(step.ids)
        curves, texts = NO_CURVES, self._text_curves[:0]
        if plan.width:
            of_drafted = rows[plan.drafted]
            whole = np.full(len(of_drafted), confidence.shape[1])
            curves = expect(self.blocks, of_drafted, confidence, whole)
            self.forecast.observe(of_drafted, curves)
        if plan.uses_text:
            predicted, texts = step.predicted, self._text_curves
            assert predicted is not None
            if step.agreed.any():
                matches = predicted.matches + AGREEMENT * step.agreed
                texts = expect_texts(self.texts, rows, matches, predicted.lengths)
        drafts = Drafts(curves, plan.drafted, step.limits, texts, step.context_lens)
        row_worth = plan.price * self._row_seconds
        of_blocks, of_texts = choose_lengths(
            self.costs.records, drafts, plan.price, row_worth, plan.least, plan.is_probe
        )
        step.from_text = of_texts > 0
        lengths = of_blocks + of_texts
        self._has_blocks = True
        self.blocks.num_verified[rows] = of_blocks
        self.texts.num_verified[rows] = of_texts
        return lengths

    def observe(self, step: Step) -> StepEstimate | None:
        """Learn what a step was made of, and what it cost where that is known.

        Returns what was expected of the latter.
        """
        self.costs.observe_batch(step.prompt_rows)
        if not step.target_seconds:
            return None
        estimate = self.costs.observe(step)
        if step.plan.is_probe:  # one that took less than it was charged with can come again sooner
            spared = max(estimate.draft_seconds - step.draft_seconds, 0.0)
            self.probes.refund(min(spared, self._probe_charge))
        return estimate

    def estimates(self) -> Estimates:
        """What was learned, for another run to recall."""
        blocks = self.blocks
        return Estimates(self.costs, blocks.seen, blocks.accepted, blocks.bias_of_all)

    def recall(self, estimates: Estimates) -> None:
        """Start from what another run has learned of drafts; of costs, we have it already.

        Not from what it forecast. The first steps draft in any case, and so show whether these
        requests' drafts are worth it; who went by the forecast of others, for whom they were not,
        would have to wait for probes.
        """
        self.blocks.recall(estimates.seen, estimates.accepted)
        self.blocks.bias_of_all[:] = estimates.bias


def _resting(step: Step, undrafted: Undrafted) -> Plan:
    """The drafter rests, and texts are used where that pays."""
    rate, plain_rate = undrafted.rate, undrafted.plain_rate
    return Plan.nothing(
        step.num_requests, rate, speedup=rate / plain_rate, uses_text=rate > plain_rate
    )
