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
from dataclasses import dataclass, replace

import numpy as np

from vllm_dflash.planning import Bools, Floats, Ints
from vllm_dflash.planning.candidates import Candidates, select
from vllm_dflash.planning.costs import StepCosts, StepEstimate, StepTimes
from vllm_dflash.planning.forecast import Forecast
from vllm_dflash.planning.probing import ProbeSchedule
from vllm_dflash.planning.request_rows import RequestRows
from vllm_dflash.planning.survival import Bias, Calibration, survival_curves

MARGIN = 1.01
"""Drafting must promise this much more than plain decoding, whose cost is known better."""
CLOSE = 0.95
"""From this speed-up on, drafting nearly pays, and is looked at more often."""
CLOSE_REST_STEPS = 1
PROBE_SHARE = 16
"""A probe drafts one in this many requests, and at least one."""
PROBE_LENGTH = 3
"""Drafts a probe has verified whatever they seem worth, to see whether estimates still hold."""
CATCH_UP_STEPS = 64
"""Steps over which the cost of storing context that was kept back is spread."""
REST_STEPS = 7
"""Undrafted steps between two that are planned: planning is to cost nothing where it says no."""
OUTLOOK_RATE = 0.5
OUTLOOK_FADE = 0.05
"""Share of the way to everybody's outlook that a request goes with each planned step."""


@dataclass(frozen=True)
class Plan:
    """What to draft this step."""

    drafted: Bools
    """[R]."""
    width: int
    """Tokens to draft for each of them; 0 if there are none."""
    price: float
    """Tokens a second is worth: the best rate to be had."""
    speedup: float
    """Expected rate against plain decoding."""
    is_probe: bool = False
    least: int = 0
    """Drafts to verify of each request whatever they seem worth."""
    rest: int = 0
    """Steps to come for which nobody need be asked again, as long as the batch stays the same."""


class Planner:
    """State and decisions of one worker."""

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
        # Twice the batch: requests that wait for room in it keep what is known of them.
        num_rows = 2 * max_requests
        self.bias = Bias(num_rows)
        self._requests = RequestRows(num_rows)
        self._outlook = np.zeros(num_rows)
        # The last drafts of each request, until they are verified.
        self._confidence = np.zeros((num_rows, max_draft))
        self._survival = np.zeros((num_rows, max_draft))
        self._num_drafts = np.zeros(num_rows, dtype=np.int64)

    def _rows(self, ids: Sequence[str]) -> Ints:
        rows, fresh = self._requests.of(ids)
        if len(fresh):
            self._outlook[fresh] = self.forecast.mean_outlook
            self._num_drafts[fresh] = 0
            self.bias.forget(fresh)
        return rows

    def plan(self, ids: Sequence[str], room: Ints, pending: Ints) -> Plan:
        """Decide whom to draft and how wide, for a batch of R requests past their prompts.

        Args:
            ids: of the requests, R of them.
            room: drafts each can use at most, [R].
            pending: context rows of each to be stored before it can be drafted, [R].
        """
        rows = self._rows(ids)
        num_requests = len(ids)
        self._outlook[rows] += OUTLOOK_FADE * (self.forecast.mean_outlook - self._outlook[rows])
        seconds = self.costs.plain(num_requests)
        plain_rate = num_requests / seconds
        nobody = Plan(np.zeros(num_requests, dtype=bool), 0, plain_rate, 1.0, rest=REST_STEPS)
        able = room > 0
        if not able.any():
            return nobody
        widest = min(self.max_draft, int(room.max()))
        best, tokens = self._best(self._outlook[rows], able, widest, pending)
        speedup = best.price / plain_rate
        if speedup > MARGIN:
            self.probes.restart()
            return replace(best, speedup=speedup)
        if speedup > CLOSE:
            nobody = replace(nobody, rest=CLOSE_REST_STEPS)
        # What the best plan loses if it is right; and a probe catches up for itself alone.
        lost = tokens / best.price - tokens / plain_rate
        lost += float(self.costs.context.at(pending[best.drafted].sum()))
        few, cost = self._few(able, widest, pending)
        if not self.probes.is_due(
            (1 + nobody.rest) * seconds, min(lost, cost), is_close=speedup > CLOSE
        ):
            return nobody
        probe = best if lost < cost else few
        return replace(probe, price=plain_rate, is_probe=True)

    def _best(self, outlook: Floats, able: Bools, widest: int, pending: Ints) -> tuple[Plan, float]:
        """The requests and width that promise the best rate, and the tokens expected of them."""
        num_requests = len(outlook)
        outcomes = self.forecast.outcomes(outlook[able])
        kept, gain = outcomes.kept[..., :widest], outcomes.gain[..., :widest]  # [G, T, w]
        widths = np.arange(1, widest + 1)
        block_rows = outcomes.drafted[:, None] * (1 + widths)  # [G, w]
        if self.whole_batch:
            block_rows = np.full_like(block_rows, num_requests * (1 + self.max_draft))
        # What is behind has to be caught up with once, and then pays for many steps.
        context_rows = outcomes.drafted * (1 + pending[able].mean() / CATCH_UP_STEPS)  # [G]
        context = self.costs.context.at(context_rows)[:, None, None]
        drafting = self.costs.draft.at(block_rows)[:, None] + context  # [G, 1, w]
        tokens = num_requests + gain
        rates = tokens / (self.costs.decoding(num_requests, num_requests + kept) + drafting)
        rates[outcomes.drafted == 0] = 0.0
        if self.whole_batch:
            rates[:-1] = rates[..., :-1] = 0.0
        best = int(rates.argmax())
        group, _, index = np.unravel_index(best, rates.shape)
        drafted = able & (outlook >= outcomes.least_outlook[group])
        plan = Plan(drafted, int(widths[index]), price=float(rates.flat[best]), speedup=1.0)
        return plan, float(tokens.flat[best])

    def _few(self, able: Bools, widest: int, pending: Ints) -> tuple[Plan, float]:
        """A few requests with little to catch up, drafted to the full, and the seconds it takes."""
        num_requests = len(able)
        count = int(able.sum())
        if not self.whole_batch:
            count = min(count, 1 + num_requests // PROBE_SHARE)
        drafted = np.zeros(num_requests, dtype=bool)
        drafted[np.argsort(np.where(able, pending, np.inf), kind="stable")[:count]] = True
        verify = self.costs.decoding(
            num_requests, num_requests + np.array([0, count * PROBE_LENGTH])
        )
        block_rows = count * (1 + widest)
        if self.whole_batch:
            block_rows = num_requests * (1 + self.max_draft)
        cost = float(self.costs.draft.at(block_rows) + verify[1] - verify[0])
        cost += float(self.costs.context.at(pending[drafted].sum()))
        return Plan(drafted, widest, price=0.0, speedup=1.0, least=PROBE_LENGTH), cost

    def lengths(self, plan: Plan, ids: Sequence[str], room: Ints, confidence: Floats) -> Ints:
        """How many drafts of each drafted request to verify, [D].

        Args:
            plan: what was decided before.
            ids: of all R requests of the batch.
            room: drafts each can use at most, [R].
            confidence: probability of each drafted token under the drafter, [D, w].
        """
        rows = self._rows(ids)[plan.drafted]
        survival = np.cumprod(self.calibration.acceptance(confidence), axis=1)
        curves = survival_curves(survival, self.bias.of(rows))
        self.forecast.observe(self._outlook[rows], curves)
        self._outlook[rows] += OUTLOOK_RATE * (curves[:, 0] - self._outlook[rows])
        width = confidence.shape[1]
        self._confidence[rows, :width], self._survival[rows, :width] = confidence, survival
        self._num_drafts[rows] = width
        room = np.minimum(room[plan.drafted], width)
        candidates = Candidates.chains(curves, room)
        tokens = len(ids) + np.arange(len(candidates.survival) + 1)
        chosen = select(candidates, self.costs.decoding(len(ids), tokens), plan.price)
        lengths = np.bincount(candidates.request[chosen], minlength=len(rows))
        return np.maximum(lengths, np.minimum(room, plan.least))

    def observe_verification(self, ids: Sequence[str], drafted: Ints, accepted: Ints) -> None:
        """Learn what became of drafts: how many of each request were verified, accepted, [R]."""
        rows = self._rows(ids)
        # Drafts that are not ours (a runner may pad with some) have nothing to teach.
        known = (drafted > 0) & (drafted <= self._num_drafts[rows])
        rows, drafted, accepted = rows[known], drafted[known], accepted[known]
        if not len(rows):
            return
        self._num_drafts[rows] = 0
        verified = np.arange(self.max_draft) < drafted[:, None]  # [D, K]
        expected = (self._survival[rows] * verified).sum(axis=1)
        self.calibration.observe(self._confidence[rows], drafted, accepted)
        self.bias.observe(rows, expected, accepted)

    def observe_batch(self, prompt_rows: int) -> None:
        """Learn how many rows of a step belonged to prompts."""
        self.costs.observe_batch(prompt_rows)

    def observe_step(self, times: StepTimes) -> StepEstimate | None:
        """Learn what a step cost; returns what was expected."""
        return self.costs.observe(times)
