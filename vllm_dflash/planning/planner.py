"""The planner: which requests to draft, how wide, and which drafts to verify.

In every step it maximises expected tokens per second, of the batch or of each request
(`objective.py`). A batch of R requests yields R tokens in any case; drafting yields more, in a
longer step. Before drafting, `plan` weighs what drafts have yielded lately against what the step
would cost, and may leave out some requests, or all. After drafting, `decide_lengths` takes each
request's block or free draft, and cuts it where its tokens are no longer worth their time.

Both see the drafter's distribution and what became of earlier drafts, never a token that was
sampled for the draft's position. So the output distribution is that of verifying any drafts (arXiv
2211.17192, section 3.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vllm_dflash.planning import Bools, Floats, Ints
from vllm_dflash.planning.chances import (
    AGREEMENT,
    Chances,
    expect,
    expect_texts,
    learn,
    learn_blocks,
)
from vllm_dflash.planning.costs import StepCosts
from vllm_dflash.planning.forecast import Forecast
from vllm_dflash.planning.objective import price_of, worth_of
from vllm_dflash.planning.probes import PlainChecks, ProbeSchedule
from vllm_dflash.planning.search import (
    Choice,
    OfferedDrafts,
    UndraftedBatch,
    best_step,
    choose_lengths,
)
from vllm_dflash.planning.step import Plan, RequestRows, StepEstimate, StepRecord

MARGIN = 1.01
"""Ratio by which drafting must beat plain decoding, whose cost is known better."""
CLOSE = 0.95
"""Speed-up from which drafting nearly pays, and is checked more often."""
PROBE_SHARE = 16
"""A probe drafts one request, and one more per this many in the batch."""
PROBE_LENGTH = 3
"""Drafts that a probe verifies, however little they seem worth, to test the estimates."""
SKIP_STEPS, CLOSE_SKIP_STEPS = 7, 1
"""Undrafted steps between two that are planned: planning should cost next to nothing while drafting
does not pay. Texts are still looked up in between."""
OLD_TOKENS = 24.0
"""Observations that all earlier ones count for once something has shown that they are outdated."""


class LearningPlanner:
    """What both planners use and learn: about requests, about drafts, and what steps take."""

    costs: StepCosts

    def __init__(
        self, max_draft: int, max_requests: int, most_free: int, *, fair: bool = False
    ) -> None:
        """Plan blocks of up to `max_draft` tokens (K) a request, and `max_requests` a batch.

        Texts predict up to `most_free` drafts of each request (F). `fair`: the objective.
        """
        self.max_draft, self.fair = max_draft, fair
        # Twice the batch: what is known of requests that wait to be run again is kept.
        num_rows = 2 * max_requests
        self.block_chances = Chances.of(max_draft, num_rows)
        self.text_chances = Chances.of(most_free, num_rows)
        self.forecast = Forecast(max_draft, num_rows, fair=fair)
        self.probes = ProbeSchedule()
        self.plain_checks = PlainChecks(max_requests)
        self._requests = RequestRows(num_rows)
        self._probe_charge = 0.0
        """Seconds that a probe was last taken to cost, made or not; on V2, 0 while blocks pay."""

    def _rows(self, ids: Sequence[str]) -> Ints:
        rows, fresh = self._requests.of(ids)
        if len(fresh):
            self._forget(fresh)
        return rows

    def _forget(self, rows: Ints) -> None:
        """Reset rows that now belong to new requests."""
        self.forecast.forget(rows)
        self.block_chances.forget(rows)
        self.text_chances.forget(rows)

    def _doubt_blocks(self) -> None:
        """Let what was learned about blocks count little."""
        self.block_chances.keep(OLD_TOKENS)
        self.forecast.restart()


class Planner(LearningPlanner):
    """State and decisions of one worker, on V1."""

    agrees_across_ranks = False  # it goes by measured times

    def __init__(
        self,
        max_draft: int,
        max_requests: int,
        costs: StepCosts,
        *,
        most_free: int = 0,
        fair: bool = False,
    ) -> None:
        """See `LearningPlanner`; start from these costs."""
        super().__init__(max_draft, max_requests, most_free, fair=fair)
        self.costs = costs
        self._text_curves: Floats = np.zeros((0, most_free))
        """Worth of what the text of each request of this step predicts, [R, F] or [0, F]."""
        self._row_seconds = 0.0

    def plan(self, step: StepRecord) -> Plan:
        """Learn what became of the drafts that the step verified, then choose what to draft.

        Reads the step's `ids`, `verified`, `produced`, `limits`, `waiting`, `predicted`,
        `context_lens` and `is_resting`.
        """
        rows = self._rows(step.ids)
        learn_blocks(self.block_chances, rows, step.verified, step.accepted)
        self._text_curves = texts = self._expect_texts(rows, step)
        rests = step.is_resting or not step.limits.any()
        scores = step.limits * 0.0 if step.is_resting else self.forecast.scores(rows)
        batch = UndraftedBatch(scores, step.limits, step.waiting, step.context_lens, texts)
        most = 0 if rests else self.max_draft
        best = best_step(self.costs.records, batch, self.forecast.summary, most, self.fair)
        self._row_seconds = best.row_seconds
        rate, plain_rate = best.undrafted_rate, best.plain_rate
        uses_text, speedup = rate > plain_rate, rate / plain_rate
        price = price_of(step.num_requests, rate, best.undrafted_seconds, self.fair)
        resting = Plan.without_block(
            step.num_requests, price=price, speedup=speedup, uses_text=uses_text
        )
        chosen = resting if rests else self._weigh(step, resting, best)
        can_check = not chosen.is_probe and (chosen.uses_text or chosen.width > 0)
        can_check &= bool(step.decoding.all())  # otherwise prompts may share the next step
        if can_check and self.plain_checks.are_due(step.num_requests, chosen.speedup):
            return replace(resting, speedup=chosen.speedup, uses_text=False)
        return chosen

    def _expect_texts(self, rows: Ints, step: StepRecord) -> Floats:
        """Return the worth of what texts predict, [R, F]; [0, F] if they predict nothing."""
        predicted = step.predicted
        if predicted is None:
            return self._text_curves[:0]
        learn(self.text_chances, rows, step.verified, predicted.known, predicted.came_true)
        if not predicted.lengths.any():
            return self._text_curves[:0]
        curves = expect_texts(self.text_chances, rows, predicted.matches, predicted.lengths)
        return worth_of(curves, self.fair)

    def _weigh(self, step: StepRecord, resting: Plan, best: Choice) -> Plan:
        """Return the best choice if it pays, otherwise `resting`, and a probe from time to time."""
        rate, uses_text = best.rate, len(self._text_curves) > 0
        gain, speedup = rate / best.undrafted_rate, rate / best.plain_rate
        if gain > MARGIN:
            self.probes.restart()
            price = price_of(step.num_requests, rate, best.seconds, self.fair)
            return Plan(best.drafted, best.width, price, speedup=speedup, uses_text=uses_text)
        holds_for = CLOSE_SKIP_STEPS if gain > CLOSE else SKIP_STEPS
        # A prompt may end with the next step, and then another request can be drafted. And free
        # drafts that are better than the drafter's may be gone by then.
        is_displaced = resting.uses_text and rate > MARGIN * best.plain_rate
        if is_displaced or not step.decoding.all():
            holds_for = 0
        probe, seconds = self._cheapest_probe(step, resting)
        # Seconds that the best plan loses if it is right. A probe bears all of its catching up.
        lost = best.seconds * (1.0 - gain)
        lost += float(self.costs.context.at(step.waiting[best.drafted].sum()))
        undrafted_seconds = (1 + holds_for) * best.plain_seconds
        self._probe_charge = min(lost, seconds)
        if not self.probes.is_due(undrafted_seconds, self._probe_charge, is_close=gain > CLOSE):
            return replace(resting, holds_for=holds_for)
        if lost < seconds:
            return replace(probe, drafted=best.drafted, width=best.width, min_verified=0)
        return probe

    def _cheapest_probe(self, step: StepRecord, resting: Plan) -> tuple[Plan, float]:
        """Return a plan that drafts a few requests with little to catch up, and the seconds that it
        takes; `resting`: the plan that it replaces."""
        able, num_requests = np.flatnonzero(step.limits), step.num_requests
        width = min(int(step.limits.max()), self.max_draft)
        count = min(len(able), 1 + num_requests // PROBE_SHARE)
        chosen = able[np.argsort(step.waiting[able], kind="stable")[:count]]
        drafted = np.zeros(num_requests, bool)
        drafted[chosen] = True
        context, rows = float(step.context_lens[chosen].sum()), count * PROBE_LENGTH
        both = np.array([num_requests, num_requests + rows])
        reading = context * np.array([0, PROBE_LENGTH])
        plain, verifying = self.costs.decoding(num_requests, both, 0.0, reading).tolist()
        seconds = self.costs.block(count * (1 + width), context) + verifying - plain
        seconds += float(self.costs.context.at(step.waiting[chosen].sum()))
        plan = replace(
            resting, drafted=drafted, width=width, is_probe=True, min_verified=PROBE_LENGTH
        )
        return plan, seconds

    def decide_lengths(self, step: StepRecord, confidence: Floats) -> tuple[Ints, Bools]:
        """Return how many drafts of each request to verify, and whether they are its text's, [R].

        Args:
            step: has its plan, `limits` of the drafted requests, [R], and what they `agreed` on.
            confidence: probability of each drafted token under the drafter, [D, w].
        """
        plan, rows, predicted = step.plan, self._rows(step.ids), step.predicted
        curves: Floats = np.zeros((0, 0))
        texts = self._text_curves[:0]
        if plan.width:
            of_drafted = rows[plan.drafted]
            whole = np.full(len(of_drafted), confidence.shape[1])
            curves = expect(self.block_chances, of_drafted, confidence, whole)
            self.forecast.observe(of_drafted, curves)
        if plan.uses_text:
            assert predicted is not None
            texts = self._text_curves
            if step.agreed.any():
                matches = predicted.matches + AGREEMENT * step.agreed
                found = expect_texts(self.text_chances, rows, matches, predicted.lengths)
                texts = worth_of(found, self.fair)
        drafts = OfferedDrafts(
            blocks=worth_of(curves, self.fair),
            drafted=plan.drafted,
            limits=step.limits,
            texts=texts,
            context_lens=step.context_lens,
            price=plan.price,
            row_worth=plan.price * self._row_seconds,
            min_verified=plan.min_verified,
            is_probe=plan.is_probe,
        )
        of_blocks, of_texts = choose_lengths(self.costs.records, drafts)
        self.block_chances.num_verified[rows] = of_blocks
        self.text_chances.num_verified[rows] = of_texts
        return of_blocks + of_texts, of_texts > 0

    def observe(self, step: StepRecord) -> StepEstimate | None:
        """Learn what a step was made of, and what it cost where that is known.

        Returns what it was expected to cost.
        """
        self.costs.observe_batch(step.prompt_rows)
        if not step.target_seconds:
            return None
        estimate = self.costs.observe(step)
        self.plain_checks.note(step, step.target_seconds, estimate.target_seconds)
        if step.plan.is_probe:  # one that cost less than charged can come again sooner
            spared = max(estimate.draft_seconds - step.draft_seconds, 0.0)
            self.probes.refund(min(spared, self._probe_charge))
        return estimate
