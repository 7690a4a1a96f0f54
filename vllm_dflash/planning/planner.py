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
from vllm_dflash.planning.candidates import choose_lengths
from vllm_dflash.planning.costs import StepCosts
from vllm_dflash.planning.draft_tree import MOST_CANDIDATES, chains_in
from vllm_dflash.planning.estimates import Estimates
from vllm_dflash.planning.forecast import Forecast
from vllm_dflash.planning.free_drafts import (
    AGREEMENT,
    NO_FREE,
    FreeAcceptance,
    Rest,
    best_rest,
    expect_free,
    free_curves,
)
from vllm_dflash.planning.outlook import (
    Able,
    Choice,
    catch_up_seconds,
    cheapest_probe,
    look_ahead,
)
from vllm_dflash.planning.probing import ProbeSchedule
from vllm_dflash.planning.request_rows import RequestRows
from vllm_dflash.planning.step import Plan, Step, StepEstimate
from vllm_dflash.planning.survival import RECALLED_TOKENS
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
NO_LENGTHS: Ints = np.zeros(0, dtype=np.int64)


def _resting(step: Step, rest: Rest) -> Plan:
    """The drafter rests, and texts are used where that pays."""
    uses_text, speedup = rest.rate > rest.plain_rate, rest.rate / rest.plain_rate
    return Plan.nothing(step.num_requests, rest.rate, speedup=speedup, uses_text=uses_text)


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
    ) -> None:
        """Plan for blocks of up to `max_draft` tokens (K) a request, and `max_requests` a batch.

        Where texts are looked up, for up to `most_free` free drafts of each (F).
        """
        self.max_draft = max_draft
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
            self.blocks.forget(fresh, self.forecast.summary.mean_first_survival)
            self.free.forget(fresh)
        return rows

    def plan(self, step: Step) -> Plan:
        """Learn what became of the drafts that the step verified, then say whom it drafts.

        Reads the step's `ids`, `verified`, `produced`, `limits`, `waiting` and `foretold`.
        """
        rows = self._rows(step.ids)
        self.blocks.learn(rows, *step.chains)
        if step.likeliest is not None:
            self.trees.learn(rows, *step.likeliest)
        free = NO_FREE
        if step.foretold is not None:
            found = expect_free(self.free.tables, rows, step.verified, step.foretold)
            self._free_curves, free = found
        rest = best_rest(self.costs.records, step.num_requests, step.context_lens, free)
        self._row_seconds = rest.row_seconds
        if not step.is_resting:
            able, best = look_ahead(
                self.costs.records,
                self.blocks.first_survival(rows, self.forecast.summary.mean_first_survival),
                step.limits,
                step.waiting,
                step.context_lens,
                self.max_draft,
                self.forecast.summary,
                rest,
                free,
            )
            if able.widest:
                return self._weigh(step, rest, able, best, uses_text=len(free.kept) > 0)
        return _resting(step, rest)

    def _weigh(self, step: Step, rest: Rest, able: Able, best: Choice, *, uses_text: bool) -> Plan:
        """The best choice if it pays, and else a probe from time to time."""
        # Forecast are chains. Trees bring more in the same time.
        rate, tokens = best.rate * self.trees.gain, best.tokens * self.trees.gain
        gain = rate / rest.rate
        plan = Plan(
            best.drafted, best.width, rate, speedup=rate / rest.plain_rate, uses_text=uses_text
        )
        if gain > MARGIN:
            self.probes.restart()
            return plan
        skip_steps = CLOSE_SKIP_STEPS if gain > CLOSE else SKIP_STEPS
        resting = _resting(step, rest)
        # A prompt may end with the next step, and another request can be drafted then. And free
        # drafts that are better than the drafter's may be gone by then.
        is_displaced = resting.uses_text and rate > MARGIN * rest.plain_rate
        if is_displaced or not step.decoding.all():
            skip_steps = 0
        # What the best plan loses if it is right; and a probe catches up for itself alone.
        lost = tokens / rate - tokens / rest.rate
        lost += catch_up_seconds(self.costs.records, step.waiting, best.drafted)
        count = min(len(able.scores), 1 + step.num_requests // PROBE_SHARE)
        block_rows = count * (1 + able.widest)
        probe = cheapest_probe(
            self.costs.records,
            able,
            step.waiting,
            step.context_lens,
            count,
            block_rows,
            PROBE_LENGTH,
        )
        undrafted_seconds = (1 + skip_steps) * rest.plain_seconds
        self._probe_charge = min(lost, probe.seconds)
        if not self.probes.is_due(undrafted_seconds, self._probe_charge, is_close=gain > CLOSE):
            return replace(resting, skip_steps=skip_steps)
        plan = replace(
            plan,
            price=resting.price,
            speedup=resting.speedup,
            is_probe=True,
            uses_text=resting.uses_text,
        )
        if lost < probe.seconds:
            return plan
        return replace(plan, drafted=probe.drafted, width=able.widest, least=PROBE_LENGTH)

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
        free, free_lengths = NO_CURVES, NO_LENGTHS
        if plan.uses_text:
            foretold, free = step.foretold, self._free_curves
            assert foretold is not None
            free_lengths = foretold.lengths
            if step.agreed.any():
                matches = foretold.matches + AGREEMENT * step.agreed
                free = free_curves(self.free.tables, rows, matches, free_lengths)
        of_blocks, of_texts = choose_lengths(
            self.costs.records,
            curves,
            plan.drafted,
            limits,
            free,
            free_lengths,
            step.context_lens,
            plan.price,
            self._row_seconds,
            plan.least,
            plan.is_probe,
        )
        step.from_text = of_texts > 0
        lengths = of_blocks + of_texts
        if step.trees is not None:
            of_blocks[plan.drafted] = chains_in(step.trees.is_first, of_blocks[plan.drafted])
        self.blocks.verify(rows, of_blocks)
        self.free.verify(rows, of_texts)
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
        ranks = np.stack([self.trees.calibration.seen, self.trees.calibration.accepted])
        return Estimates(self.costs, calibration.seen, calibration.accepted, bias.everybody, ranks)

    def recall(self, estimates: Estimates) -> None:
        """Start from what another run has learned of drafts; of costs, we have it already.

        Not from what it forecast. The first steps draft in any case, and so show whether these
        requests' drafts are worth it; who went by the forecast of others, for whom they were not,
        would have to wait for probes.
        """
        self.blocks.calibration.recall(estimates.seen, estimates.accepted)
        self.blocks.bias.everybody[:] = estimates.bias
        # Each draft that is rejected tells of all ranks.
        seen, accepted = estimates.ranks
        self.trees.calibration.recall(seen, accepted, RECALLED_TOKENS * (MOST_CANDIDATES - 1))
