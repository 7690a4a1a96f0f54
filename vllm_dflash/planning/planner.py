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
from vllm_dflash.planning.block_acceptance import BlockAcceptance
from vllm_dflash.planning.candidates import choose_sources, cut
from vllm_dflash.planning.costs import StepCosts
from vllm_dflash.planning.draft_tree import chains_in
from vllm_dflash.planning.estimates import Estimates
from vllm_dflash.planning.forecast import Forecast
from vllm_dflash.planning.free_drafts import (
    AGREEMENT,
    FreeAcceptance,
    FreeOutcomes,
    Rest,
    best_rest,
    outcomes_of_free,
)
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
from vllm_dflash.planning.tree_acceptance import TreeAcceptance

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
no. What texts foretell is looked at in between, too."""


NO_CURVES: Floats = np.zeros((0, 0))


class Planner:
    """State and decisions of one worker."""

    is_same_everywhere = False  # it goes by measured times

    def __init__(
        self,
        max_draft: int,
        max_requests: int,
        costs: StepCosts,
        *,
        most_free: int = 0,
        whole_batch: bool = False,
    ) -> None:
        """Plan for blocks of up to `max_draft` tokens (K) a request, and `max_requests` a batch.

        Where texts are looked up, for up to `most_free` free drafts of each (F). With
        `whole_batch`, blocks are drafted for everybody and to the full, or for nobody, as a
        captured graph has it.
        """
        self.max_draft = max_draft
        self.whole_batch = whole_batch
        self.costs = costs
        self.forecast = Forecast(max_draft)
        self.probes = ProbeSchedule()
        # Twice the batch: requests that wait to be run again keep what is known of them.
        num_rows = 2 * max_requests
        self.blocks = BlockAcceptance(max_draft, num_rows)
        self.free = FreeAcceptance(most_free, num_rows)
        self.trees = TreeAcceptance(max_draft, num_rows)
        self._requests = RequestRows(num_rows)
        self._free_curves = NO_CURVES
        """Survival of what the text of each request of this step foretells, [R, F]."""
        self._row_seconds = 0.0
        self._probe_charge = 0.0
        """Seconds that the last probe was taken to cost."""

    def _rows(self, ids: Sequence[str]) -> Ints:
        rows, fresh = self._requests.of(ids)
        if len(fresh):
            self.blocks.forget(fresh, self.forecast.mean_first_survival)
            self.free.forget(fresh)
        return rows

    def plan(self, step: Step) -> Plan:
        """Learn what became of the drafts that the step verified, then say whom it drafts.

        Reads the step's `ids`, `verified`, `produced`, `limits`, `waiting` and `foretold`.
        """
        rows = self._rows(step.ids)
        self.blocks.learn(rows, step)
        if step.likeliest is not None:
            self.trees.learn(rows, *step.likeliest)
        rest, free = self._foresee(rows, step)
        speedup = rest.rate / rest.plain_rate
        resting = Plan.nothing(
            step.num_requests, rest.rate, speedup=speedup, uses_text=rest.rate > rest.plain_rate
        )
        if step.is_resting:
            return resting
        first = self.blocks.first_survival(rows, self.forecast.mean_first_survival)
        able = able_requests(first, step.limits, step.waiting, step.context_lens, self.max_draft)
        if not able.widest:
            return resting
        best = self._best(first, able, step, rest, free)
        # Forecast are chains. Trees bring more in the same time.
        more = self.trees.gain
        best = best._replace(rate=best.rate * more, tokens=best.tokens * more)
        gain = best.rate / rest.rate
        plan = replace(
            resting,
            drafted=best.drafted,
            width=best.width,
            price=best.rate,
            speedup=gain * speedup,
            uses_text=len(free.kept) > 0,
        )
        if gain > MARGIN:
            self.probes.restart()
            return plan
        skip_steps = CLOSE_SKIP_STEPS if gain > CLOSE else SKIP_STEPS
        # A prompt may end with the next step, and another request can be drafted then. And free
        # drafts that are better than the drafter's may be gone by then.
        is_displaced = resting.uses_text and best.rate > MARGIN * rest.plain_rate
        if is_displaced or not step.decoding.all():
            skip_steps = 0
        # What the best plan loses if it is right; and a probe catches up for itself alone.
        lost = best.tokens / best.rate - best.tokens / rest.rate
        lost += self.costs.context.at_one(step.waiting[best.drafted].sum())
        probe, cost = self._probe(able, step)
        undrafted_seconds = (1 + skip_steps) * rest.plain_seconds
        self._probe_charge = min(lost, cost)
        if not self.probes.is_due(undrafted_seconds, self._probe_charge, is_close=gain > CLOSE):
            return replace(resting, skip_steps=skip_steps)
        if lost < cost:
            probe = plan
        return replace(
            probe,
            price=rest.rate,
            speedup=speedup,
            is_probe=True,
            uses_text=resting.uses_text,
        )

    def _foresee(self, rows: Ints, step: Step) -> tuple[Rest, FreeOutcomes]:
        """What comes of a step without the drafter, and what of the free drafts."""
        foretold, free = step.foretold, self.free.nothing
        if foretold is not None:
            self.free.learn(rows, step.verified, foretold)
            if foretold.lengths.any():
                self._free_curves = self.free.curves(rows, foretold.matches, foretold.lengths)
                free = outcomes_of_free(self._free_curves)
        rest = best_rest(self.costs.records, step.num_requests, step.context_lens, free)
        self._row_seconds = rest.row_seconds
        return rest, free

    def _best(
        self, first: Floats, able: Able, step: Step, rest: Rest, free: FreeOutcomes
    ) -> Choice:
        """The requests and width that promise the best rate."""
        context = float(step.context_lens.sum())
        outcomes = self.forecast.outcomes(able.scores)
        if len(free.kept) or (context and any(self.costs.attention[1:])):
            worth = worth_drafting(
                self.costs.records[0],
                rest,
                able.mask,
                able.scores,
                able.context_lens,
                *outcomes,
                free,
                self.whole_batch,
            )
            if worth.any() and not worth.all():
                limits = step.limits.copy()
                limits[able.mask] *= worth
                able = able_requests(first, limits, step.waiting, step.context_lens, self.max_draft)
                outcomes = self.forecast.outcomes(able.scores)
        return best_choice(
            self.costs.records,
            step.context_lens,
            *able,
            *outcomes,
            free,
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
        """How many drafts of each request to verify, [R]. Writes the step's `from_text`.

        Args:
            step: with its plan; `limits` of the drafted requests, [R], and what they `agreed` on.
                If it has `candidates`, lengths are those of its `trees`, which are written.
            confidence: probability of each drafted token under the drafter, [D, w].
        """
        plan, rows = step.plan, self._rows(step.ids)
        curves, limits = NO_CURVES, step.limits
        if plan.width:
            first, curves = self.blocks.expect(rows[plan.drafted], confidence)
            self.forecast.observe(first, curves)
            if step.candidates is not None:
                of_drafted = rows[plan.drafted]
                curves, limits = self.trees.grow(step, of_drafted, self.blocks, self.costs, curves)
        lengths: Ints = np.zeros(step.num_requests, dtype=np.int64)
        free, free_lengths = NO_CURVES, lengths
        if plan.uses_text:
            foretold, free = step.foretold, self._free_curves
            assert foretold is not None
            free_lengths = foretold.lengths
            if step.agreed.any():
                matches = foretold.matches + AGREEMENT * step.agreed
                free = self.free.curves(rows, matches, free_lengths)
        chosen = choose_sources(
            curves,
            plan.drafted,
            limits,
            free,
            free_lengths,
            plan.price * self._row_seconds,
            plan.is_probe,
        )
        step.from_text = chosen.from_text
        lengths[chosen.have_drafts] = cut(
            self.costs.records,
            chosen.curves,
            chosen.limits,
            step.context_lens,
            chosen.have_drafts,
            plan.price,
        )
        if plan.least:
            least = np.minimum(chosen.limits, plan.least) * plan.drafted
            lengths = np.maximum(lengths, least)
        of_blocks = np.where(chosen.from_text, 0, lengths)
        if step.trees is not None:
            of_blocks[plan.drafted] = chains_in(step.trees.is_first, of_blocks[plan.drafted])
        self.blocks.verify(rows, of_blocks)
        self.free.verify(rows, np.where(chosen.from_text, lengths, 0))
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
        calibration, bias = self.blocks.calibration, self.blocks.bias
        return Estimates(self.costs, calibration.seen, calibration.accepted, bias.everybody)

    def recall(self, estimates: Estimates) -> None:
        """Start from what another run has learned of drafts; of costs, we have it already.

        Not from what it forecast. The first steps draft in any case, and so show whether these
        requests' drafts are worth it; who went by the forecast of others, for whom they were not,
        would have to wait for probes.
        """
        self.blocks.calibration.recall(estimates.seen, estimates.accepted)
        self.blocks.bias.everybody[:] = estimates.bias
