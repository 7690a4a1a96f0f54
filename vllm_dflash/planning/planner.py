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
from vllm_dflash.planning.candidates import cut
from vllm_dflash.planning.costs import StepCosts
from vllm_dflash.planning.estimates import Estimates
from vllm_dflash.planning.forecast import Forecast
from vllm_dflash.planning.outlook import (
    Able,
    Choice,
    able_requests,
    best_choice,
    worth_drafting,
)
from vllm_dflash.planning.probing import ProbeSchedule
from vllm_dflash.planning.request_rows import RequestRows
from vllm_dflash.planning.step import Plan, Step, StepEstimate
from vllm_dflash.planning.survival import Bias, Calibration, expect, fade, learn_acceptance

MARGIN = 1.01
"""Drafting must promise this much more than plain decoding, whose cost is known better."""
CLOSE = 0.95
"""From this speed-up on, drafting nearly pays, and is looked at more often."""
PROBE_SHARE = 16
"""A probe drafts one request, and one more for so many in the batch."""
PROBE_LENGTH = 3
"""Drafts a probe has verified whatever they seem worth, to see whether estimates still hold."""
SKIP_STEPS, CLOSE_SKIP_STEPS = 7, 1
"""Undrafted steps between two that are planned: planning is to cost nothing where it says no."""


class Planner:
    """State and decisions of one worker."""

    is_same_everywhere = False  # it goes by measured times

    def __init__(
        self,
        max_draft: int,
        max_requests: int,
        costs: StepCosts,
        *,
        whole_batch: bool = False,
    ) -> None:
        """Plan for up to `max_draft` tokens (K) a request, and `max_requests` a batch.

        With `whole_batch`, blocks are drafted for everybody and to the full, or for nobody, as a
        captured graph has it.
        """
        self.max_draft = max_draft
        self.whole_batch = whole_batch
        self.costs = costs
        self.calibration = Calibration(max_draft)
        self.forecast = Forecast(max_draft)
        self.probes = ProbeSchedule()
        # Twice the batch: requests that wait to be run again keep what is known of them.
        num_rows = 2 * max_requests
        self.bias = Bias(num_rows)
        self._requests = RequestRows(num_rows)
        self._first_survival = np.zeros(num_rows)
        """How likely each request's first draft has been to be accepted, lately."""
        # The drafts that the next step may verify, and how many of each request's.
        self._confidence = np.zeros((num_rows, max_draft))
        self._survival = np.zeros((num_rows, max_draft))
        self._num_drafts = np.zeros(num_rows, dtype=np.int64)
        self._has_drafts = False
        self._probe_charge = 0.0
        """Seconds that the last probe was taken to cost."""

    def _rows(self, ids: Sequence[str]) -> Ints:
        rows, fresh = self._requests.of(ids)
        if len(fresh):
            self._first_survival[fresh] = self.forecast.mean_first_survival
            self._num_drafts[fresh] = 0
            self.bias.forget(fresh)
        return rows

    def plan(self, step: Step) -> Plan:
        """Learn what became of the drafts that the step verified, then say whom it drafts.

        Reads the step's `ids`, `verified`, `produced`, `limits` and `waiting`.
        """
        rows = self._rows(step.ids)
        self._learn_acceptance(rows, step)
        first = fade(self._first_survival, rows, self.forecast.mean_first_survival)
        able = able_requests(first, step.limits, step.waiting, step.context_lens, self.max_draft)
        if not able.widest:
            return Plan.nothing(step.num_requests)
        best = self._best(first, able, step)
        plain_rate = step.num_requests / best.plain_seconds
        speedup = best.rate / plain_rate
        plan = Plan(best.drafted, best.width, price=best.rate, speedup=speedup)
        if speedup > MARGIN:
            self.probes.restart()
            return plan
        # A prompt may end with the next step, and another request can be drafted then.
        skip_steps = CLOSE_SKIP_STEPS if speedup > CLOSE else SKIP_STEPS
        if not step.decoding.all():
            skip_steps = 0
        # What the best plan loses if it is right; and a probe catches up for itself alone.
        lost = best.tokens / best.rate - best.tokens / plain_rate
        lost += self.costs.context.at_one(step.waiting[best.drafted].sum())
        probe, cost = self._probe(able, step)
        undrafted_seconds = (1 + skip_steps) * best.plain_seconds
        self._probe_charge = min(lost, cost)
        if not self.probes.is_due(undrafted_seconds, self._probe_charge, is_close=speedup > CLOSE):
            return Plan.nothing(step.num_requests, plain_rate, skip_steps)
        if lost < cost:
            probe = replace(plan, speedup=1.0)
        return replace(probe, price=plain_rate, is_probe=True)

    def _best(self, first: Floats, able: Able, step: Step) -> Choice:
        """The requests and width that promise the best rate."""
        context = float(step.context_lens.sum())
        outcomes = self.forecast.outcomes(able.scores)
        if context and any(self.costs.attention[1:]):
            plain_rate = step.num_requests / self.costs.plain(step.num_requests, context)
            worth = worth_drafting(
                self.costs.records[0],
                plain_rate,
                able.scores,
                able.context_lens,
                *outcomes,
                self.whole_batch,
            )
            if worth.any() and not worth.all():
                limits = step.limits.copy()
                limits[able.mask] *= worth
                able = able_requests(first, limits, step.waiting, step.context_lens, self.max_draft)
                outcomes = self.forecast.outcomes(able.scores)
        return best_choice(
            self.costs.records,
            context,
            *able,
            *outcomes,
            self.whole_batch,
        )

    def _probe(self, able: Able, step: Step) -> tuple[Plan, float]:
        """A few requests with little to catch up, drafted to the full, and the seconds it takes."""
        num_requests, widest = step.num_requests, able.widest
        count = len(able.scores)
        if not self.whole_batch:
            count = min(count, 1 + num_requests // PROBE_SHARE)
        drafted = np.zeros(num_requests, dtype=bool)
        drafted[np.argsort(np.where(able.mask, step.waiting, np.inf), kind="stable")[:count]] = True
        context = float(step.context_lens[drafted].sum())
        verify = self.costs.decoding(
            num_requests,
            num_requests + np.array([0, count * PROBE_LENGTH]),
            mean_context=context / count,
        )
        block_rows = count * (1 + widest)
        if self.whole_batch:
            block_rows = num_requests * (1 + self.max_draft)
        cost = self.costs.block(block_rows, context) + float(verify[1] - verify[0])
        cost += self.costs.context.at_one(step.waiting[drafted].sum())
        return Plan(drafted, widest, price=0.0, speedup=1.0, least=PROBE_LENGTH), cost

    def lengths(self, step: Step, confidence: Floats) -> Ints:
        """How many drafts of each drafted request to verify, [D].

        Args:
            step: with its plan; `limits` of the drafted requests, [R].
            confidence: probability of each drafted token under the drafter, [D, w].
        """
        drafted, rows = step.plan.drafted, self._rows(step.ids)
        first, curves = expect(
            self.calibration.rates,
            self.bias.requests,
            self.bias.everybody,
            self._first_survival,
            self._confidence,
            self._survival,
            rows[drafted],
            confidence,
        )
        self.forecast.observe(first, curves)
        lengths = cut(
            self.costs.records,
            curves,
            step.limits,
            step.context_lens,
            drafted,
            step.plan.price,
            step.plan.least,
        )
        self._num_drafts[rows[drafted]] = lengths
        self._has_drafts = True
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
        calibration = self.calibration
        return Estimates(self.costs, calibration.seen, calibration.accepted, self.bias.everybody)

    def recall(self, estimates: Estimates) -> None:
        """Start from what another run has learned of drafts; of costs, we have it already.

        Not from what it forecast. The first steps draft in any case, and so show whether these
        requests' drafts are worth it; who went by the forecast of others, for whom they were not,
        would have to wait for probes.
        """
        self.calibration.recall(estimates.seen, estimates.accepted)
        self.bias.everybody[:] = estimates.bias

    def _learn_acceptance(self, rows: Ints, step: Step) -> None:
        if not self._has_drafts:
            return
        self._has_drafts = False
        if step.verified.any():
            learn_acceptance(
                (self.calibration.seen, self.calibration.accepted, self.calibration.rates),
                (self.bias.requests, self.bias.everybody),
                (self._confidence, self._survival),
                self._num_drafts,
                rows,
                step.verified,
                step.accepted,
            )
        self._num_drafts[:] = 0
