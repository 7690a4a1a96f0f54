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

from vllm_dflash.planning import Bools, Floats, Ints
from vllm_dflash.planning.candidates import Candidates, select
from vllm_dflash.planning.costs import StepCosts, StepEstimate
from vllm_dflash.planning.forecast import Forecast
from vllm_dflash.planning.probing import ProbeSchedule
from vllm_dflash.planning.request_rows import RequestRows
from vllm_dflash.planning.step import Plan, Step
from vllm_dflash.planning.survival import Bias, Calibration, survival_curves

MARGIN = 1.01
"""Drafting must promise this much more than plain decoding, whose cost is known better."""
CLOSE = 0.95
"""From this speed-up on, drafting nearly pays, and is looked at more often."""
PROBE_SHARE = 16
"""A probe drafts one request, and one more for so many in the batch."""
PROBE_LENGTH = 3
"""Drafts a probe has verified whatever they seem worth, to see whether estimates still hold."""
CATCH_UP_STEPS = 64
"""Steps over which the cost of storing context that has waited is spread."""
SKIP_STEPS, CLOSE_SKIP_STEPS = 7, 1
"""Undrafted steps between two that are planned: planning is to cost nothing where it says no."""
FIRST_SURVIVAL_RATE = 0.5
FIRST_SURVIVAL_FADE = 0.05
"""Share of the way to everybody's first survival that a request goes with each planned step."""


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
        self._learn_acceptance(rows, step.verified, step.accepted)
        first = self._first_survival[rows]
        first += FIRST_SURVIVAL_FADE * (self.forecast.mean_first_survival - first)
        self._first_survival[rows] = first
        seconds = self.costs.plain(step.num_requests)
        plain_rate = step.num_requests / seconds
        able = step.limits > 0
        # A prompt may end with the next step, and another request can be drafted then.
        can_skip = able.any() and step.decoding.all()
        nobody = Plan.nothing(step.num_requests, plain_rate, SKIP_STEPS if can_skip else 0)
        if not able.any():
            return nobody
        widest = min(self.max_draft, int(step.limits.max()))
        best, tokens = self._best(first, able, widest, step.waiting)
        speedup = best.price / plain_rate
        if speedup > MARGIN:
            self.probes.restart()
            return replace(best, speedup=speedup)
        if speedup > CLOSE:
            nobody = replace(nobody, skip_steps=min(nobody.skip_steps, CLOSE_SKIP_STEPS))
        # What the best plan loses if it is right; and a probe catches up for itself alone.
        lost = tokens / best.price - tokens / plain_rate
        lost += float(self.costs.context.at(step.waiting[best.drafted].sum()))
        probe, cost = self._probe(able, widest, step.waiting)
        if not self.probes.is_due(
            (1 + nobody.skip_steps) * seconds, min(lost, cost), is_close=speedup > CLOSE
        ):
            return nobody
        return replace(best if lost < cost else probe, price=plain_rate, is_probe=True)

    def _best(self, first: Floats, able: Bools, widest: int, waiting: Ints) -> tuple[Plan, float]:
        """The requests and width that promise the best rate, and the tokens expected of them."""
        num_requests = len(first)
        outcomes = self.forecast.outcomes(first[able])
        kept, gain = outcomes.kept[..., :widest], outcomes.gain[..., :widest]  # [G, T, w]
        widths = np.arange(1, widest + 1)
        block_rows = outcomes.drafted[:, None] * (1 + widths)  # [G, w]
        if self.whole_batch:
            block_rows = np.full_like(block_rows, num_requests * (1 + self.max_draft))
        # What is behind has to be caught up with once, and then pays for many steps.
        context_rows = outcomes.drafted * (1 + waiting[able].mean() / CATCH_UP_STEPS)  # [G]
        context = self.costs.context.at(context_rows)[:, None, None]
        drafting = self.costs.draft.at(block_rows)[:, None] + context  # [G, 1, w]
        tokens = num_requests + gain
        rates = tokens / (self.costs.decoding(num_requests, num_requests + kept) + drafting)
        rates[outcomes.drafted == 0] = -np.inf
        if self.whole_batch:
            rates[:-1] = rates[..., :-1] = -np.inf
        best = int(rates.argmax())
        group, _, index = np.unravel_index(best, rates.shape)
        drafted = able & (first >= outcomes.least_score[group])
        plan = Plan(drafted, int(widths[index]), price=float(rates.flat[best]), speedup=1.0)
        return plan, float(tokens.flat[best])

    def _probe(self, able: Bools, widest: int, waiting: Ints) -> tuple[Plan, float]:
        """A few requests with little to catch up, drafted to the full, and the seconds it takes."""
        num_requests = len(able)
        count = int(able.sum())
        if not self.whole_batch:
            count = min(count, 1 + num_requests // PROBE_SHARE)
        drafted = np.zeros(num_requests, dtype=bool)
        drafted[np.argsort(np.where(able, waiting, np.inf), kind="stable")[:count]] = True
        verify = self.costs.decoding(
            num_requests, num_requests + np.array([0, count * PROBE_LENGTH])
        )
        block_rows = count * (1 + widest)
        if self.whole_batch:
            block_rows = num_requests * (1 + self.max_draft)
        cost = float(self.costs.draft.at(block_rows) + verify[1] - verify[0])
        cost += float(self.costs.context.at(waiting[drafted].sum()))
        return Plan(drafted, widest, price=0.0, speedup=1.0, least=PROBE_LENGTH), cost

    def lengths(self, step: Step, confidence: Floats) -> Ints:
        """How many drafts of each drafted request to verify, [D].

        Args:
            step: with its plan; `limits` of the drafted requests, [R].
            confidence: probability of each drafted token under the drafter, [D, w].
        """
        drafted = step.plan.drafted
        rows = self._rows(step.ids)[drafted]
        survival = np.cumprod(self.calibration.acceptance(confidence), axis=1)
        curves = survival_curves(survival, self.bias.of(rows))
        self.forecast.observe(self._first_survival[rows], curves)
        self._first_survival[rows] += FIRST_SURVIVAL_RATE * (
            curves[:, 0] - self._first_survival[rows]
        )
        width = confidence.shape[1]
        self._confidence[rows, :width], self._survival[rows, :width] = confidence, survival
        limits = np.minimum(step.limits[drafted], width)
        candidates = Candidates.chains(curves, limits)
        tokens = step.num_requests + np.arange(len(candidates.survival) + 1)
        seconds = self.costs.decoding(step.num_requests, tokens)
        chosen = select(candidates, seconds, step.plan.price)
        lengths = np.bincount(candidates.request[chosen], minlength=len(rows))
        lengths = np.maximum(lengths, np.minimum(limits, step.plan.least))
        self._num_drafts[rows] = lengths
        return lengths

    def observe(self, step: Step) -> StepEstimate | None:
        """Learn what a step was made of, and what it cost where that is known.

        Returns what was expected of the latter.
        """
        self.costs.observe_batch(step.prompt_rows)
        return self.costs.observe(step) if step.target_seconds else None

    def _learn_acceptance(self, rows: Ints, verified: Ints, accepted: Ints) -> None:
        # Drafts that are not ours have nothing to teach: the scheduler pads with some whom it
        # admits, or resumes after it took their drafts. Ours are verified in the next step.
        known = (verified > 0) & (verified <= self._num_drafts[rows])
        self._num_drafts[:] = 0
        rows, verified, accepted = rows[known], verified[known], accepted[known]
        if not len(rows):
            return
        inside = np.arange(self.max_draft) < verified[:, None]  # [D, K]
        expected = (self._survival[rows] * inside).sum(axis=1)
        self.calibration.observe(self._confidence[rows], verified, accepted)
        self.bias.observe(rows, expected, accepted)
