"""Draft lengths on Model Runner V2, planned before the drafts exist.

The device chooses each request's drafts: a block's, or those its text predicts. The host decides
whether a block runs at all, and how many drafts are verified. It goes by what it knew two steps
ago: how confident recent blocks were, how far texts had matched, what became of both, and how long
steps take.

Survival of the coming drafts is an expectation. For a text whose match goes on, it is the text's
own; for a block, it is that of recent blocks of similar requests (`forecast.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from vllm_dflash.planning import Floats, Ints
from vllm_dflash.planning.chances import expect, expect_texts, learn, learn_blocks
from vllm_dflash.planning.costs import StepCosts
from vllm_dflash.planning.forecast import drafts_with_block
from vllm_dflash.planning.objective import price_of, worth_of
from vllm_dflash.planning.places import Expected, best_lengths, expect_blocks
from vllm_dflash.planning.planner import (
    CLOSE,
    MARGIN,
    PROBE_LENGTH,
    PROBE_SHARE,
    LearningPlanner,
)
from vllm_dflash.planning.probes import ProbeSchedule
from vllm_dflash.planning.step import BLOCK, TEXT, Learned, Outcomes, StepEstimate, StepRecord

SURPRISE = 3.0
"""Standard deviations by which probes must be better than estimated to make us distrust that."""
PROBE_MEMORY = 0.5
"""Weight left of a probe after the next."""
LEAST_PROBED = 0.005
"""Share of the time that probes take in the long run. A block runs for all requests or for none."""
LEAST_READING = 0.02
"""Reading a context for one more draft is ignored if it costs no more accepted drafts than this."""
TYPICAL_RATE = 0.05
"""Weight of the newest look-up in what is expected of a text whose last match has ended."""


@dataclass(frozen=True)
class PlanAhead:
    """What to draft in a step of R requests; the next step verifies it."""

    lengths: Ints
    """Places for each request's drafts, [R]."""
    runs_block: bool = False
    is_experiment: bool = False
    """Whether the step goes against the plan: it drafts although that does not seem to pay (a
    probe), or decodes plainly although drafting does."""
    rate: float = 0.0
    """Expected rate (`objective.rate_of`)."""
    promise: float = 0.0
    """Worth of all drafts of blocks; for throughput, how many would be accepted."""
    text_promise: float = 0.0
    """Worth of the drafts of requests whose text is worth more than their block."""


class AheadPlanner(LearningPlanner):
    """State and decisions of one engine. Until `start` is called, every step drafts K."""

    def __init__(self, max_draft: int, max_requests: int, *, fair: bool = False) -> None:
        """See `LearningPlanner`; texts also predict up to K drafts."""
        super().__init__(max_draft, max_requests, max_draft, fair=fair)
        self.is_started = False
        self.speedup = 1.0
        """Expected rate of the last plan, relative to plain decoding."""
        self.probes = ProbeSchedule(LEAST_PROBED)
        # Expected survival of what each request's text predicts, by row [rows, K]; whether its last
        # match has ended, [rows]; and what is expected of a text where it has, [K].
        self.promises: Floats = np.zeros((2 * max_requests, max_draft))
        self._has_ended = np.ones(2 * max_requests, np.bool_)
        self.typical_promise: Floats = np.zeros(max_draft)
        self._probed: Floats = np.zeros(3)
        """Drafts of probes that were accepted, those expected to be, and the variance of that."""

    def start(
        self,
        costs: StepCosts,
        choices: Iterable[int],
        *,
        ragged_seconds: float = 0.0,
    ) -> None:
        """Choose by what steps cost from now on.

        Args:
            costs: costs of steps to start from.
            choices: lengths that all requests of a step can be given; beyond K: for trees.
            ragged_seconds: extra time of a step whose requests have different lengths.
        """
        self.is_started, self.costs = True, costs
        alike = np.array(sorted({*choices} - {0}), dtype=np.int64)
        self._alike, self._of_trees = alike[alike <= self.max_draft], alike  # [C], [C or more]
        self._ragged_seconds = float(ragged_seconds)

    def _forget(self, rows: Ints) -> None:
        super()._forget(rows)
        self.promises[rows], self._has_ended[rows] = self.typical_promise, True

    def plan(
        self, ids: Sequence[str], context_lens: Ints, limits: Ints | None = None, steps: int = 1
    ) -> PlanAhead:
        """Choose what to draft in a step of R requests, `steps` steps after the last plan.

        Args:
            ids: ids of the requests, [R].
            context_lens: tokens of context of each request, as far as is known, [R].
            limits: most drafts that each request can use, [R]; None: all can use K.
        """
        limits = np.full(len(ids), self.max_draft) if limits is None else limits
        if not self.is_started or not len(ids):
            return PlanAhead(limits, runs_block=True)
        count, context = len(ids), float(context_lens.sum())
        plain_seconds = self.costs.plain(count, context)
        drafting = self._drafting_seconds(context_lens)
        plain = count / plain_seconds
        # Accepted drafts that pay for reading each context for one more draft, at the lowest price.
        price = price_of(count, plain, plain_seconds + drafting, self.fair)
        min_worth = price * self.costs.attention.draft * context_lens
        min_worth[min_worth <= LEAST_READING] = 0.0
        rows = self._rows(ids)
        texts, nobody = worth_of(self.promises[rows], self.fair), np.full(count, -1)
        of_texts = Expected(limits, context_lens, min_worth, texts, nobody)
        nothing = best = PlanAhead(np.zeros(count, np.int64), rate=plain)
        if texts[:, 0].any():
            best = self._best(of_texts)
        curves, groups = expect_blocks(texts, self.forecast.scores(rows), self.forecast.summary)
        blocks = self._best(Expected(limits, context_lens, min_worth, curves, groups, drafting))
        if blocks.rate > best.rate:
            promise, of_texts_alone = curves[groups >= 0].sum(), curves[groups < 0].sum()
            best = replace(
                blocks, runs_block=True, promise=float(promise), text_promise=float(of_texts_alone)
            )
        chosen = best if best.rate > MARGIN * plain else nothing
        self.speedup = chosen.rate / plain
        if chosen.runs_block:
            self.probes.restart()
            self._probe_charge = 0.0
        if chosen is not nothing and self.plain_checks.are_due(count, self.speedup, steps):
            return replace(nothing, is_experiment=True)
        if chosen.runs_block:
            return chosen
        is_close = blocks.rate > CLOSE * chosen.rate
        return self._probe(of_texts, chosen, steps, is_close) or chosen

    def seconds(self, lengths: Ints, context_lens: Ints) -> Floats:
        """Return the seconds of a step of R requests and the block after it, for S plans, [S];
        `lengths`: each plan's places for drafts, [S, R]."""
        count, context = len(context_lens), float(context_lens.sum())
        alike = (lengths == lengths[:, :1]).all(axis=1) & np.isin(lengths[:, 0], self._of_trees)
        rows, reading = count + lengths.sum(axis=1), (lengths @ context_lens).astype(np.float64)
        verifying = self.costs.decoding(count, rows, context, reading)
        drafting = self._drafting_seconds(context_lens)
        return verifying + drafting + np.where(alike, 0.0, self._ragged_seconds)

    def rest_of_chains(self, outcomes: Outcomes) -> Floats:
        """Estimate how many more drafts of each block's chain would have been accepted, [R].

        If all verified drafts of the chain were accepted, this is the expectation of the rest;
        otherwise it is 0.
        """
        chances = self.block_chances.acceptance(outcomes.confidence) * (outcomes.confidence > 0.0)
        is_rest = np.arange(self.max_draft) >= outcomes.verified_in_chain[:, None]
        survival = np.where(is_rest, chances, 1.0).cumprod(axis=1)
        came = outcomes.accepted == outcomes.verified_in_chain
        return came * (survival * is_rest).sum(axis=1)

    def _drafting_seconds(self, context_lens: Ints) -> float:
        """Return the seconds of one block for each of R requests; their contexts' tokens, [R]."""
        return self.costs.block(len(context_lens) * (1 + self.max_draft), context_lens.sum())

    def _best(self, expected: Expected) -> PlanAhead:
        """Return the best lengths."""
        alike = self._alike, self._ragged_seconds
        lengths, rate = best_lengths(self.costs.records, expected, *alike, self.fair)
        return PlanAhead(lengths, rate=rate)

    def _probe(
        self, expected: Expected, chosen: PlanAhead, steps: int, is_close: bool
    ) -> PlanAhead | None:
        """Plan a probe if one is due: a block that does not seem to pay, to notice when it does."""
        limits, context = expected.limits, float(expected.context_lens.sum())
        count, length = len(limits), min(PROBE_LENGTH, self.max_draft)
        tried = min(count, 1 + count // PROBE_SHARE)
        lengths = chosen.lengths.copy()
        if self._ragged_seconds:
            tried = count
            length = int(self._alike[np.searchsorted(self._alike, length)])
        able = np.argsort(-limits, kind="stable")[:tried]
        lengths[able] = np.maximum(lengths[able], np.minimum(length, limits[able]))
        if not lengths.any():
            return None
        rows = np.array([count, count + length * tried])
        plain, verifying = self.costs.decoding(count, rows, context).tolist()
        drafting = self._drafting_seconds(expected.context_lens)
        self._probe_charge = drafting + verifying - plain
        if not self.probes.is_due(steps * plain, self._probe_charge, is_close=is_close):
            return None
        return PlanAhead(lengths, runs_block=True, is_experiment=True, rate=chosen.rate)

    def observe(self, step: StepRecord, outcomes: Outcomes | None) -> StepEstimate | None:
        """Learn from a step: what became of the drafts it verified, and how long it took.

        Its `target_seconds`, where known, include the block of `draft_rows`, which cannot be timed
        alone while the device keeps running. Returns what was expected of the step, where that is
        known.
        """
        if not self.is_started:
            return None  # lengths are fixed: nothing would use it
        if outcomes is not None and len(step.ids):
            rows = self._rows(step.ids)
            matches, lengths = outcomes.matches, outcomes.text_lengths
            found = expect_texts(self.text_chances, rows, matches, lengths)
            if outcomes.confidence[:, 0].any():
                self._learn_blocks(rows, outcomes, found)
            self._learn_texts(rows, step, outcomes, found)
        self.costs.observe_batch(step.prompt_rows)
        if not step.target_seconds:
            return None
        drafting = self.costs.block(step.draft_rows, step.context_lens.sum())
        seconds = step.target_seconds - drafting
        target = replace(step, target_seconds=seconds, draft_rows=0, inferred_seconds=drafting)
        alone = self.costs.observe(target)
        self.plain_checks.note(step, seconds, alone.target_seconds)
        return alone._replace(target_seconds=alone.target_seconds + drafting)

    def _learn_blocks(self, rows: Ints, outcomes: Outcomes, found: Floats) -> None:
        """Learn from requests that had a block; `found`: survival of texts' predictions, [R, K]."""
        made = np.flatnonzero(outcomes.confidence[:, 0] > 0.0)
        of_those = rows[made]
        verified = np.where(outcomes.source == BLOCK, outcomes.verified_in_chain, 0)
        accepted = np.where(verified > 0, outcomes.accepted, 0)
        if self._probe_charge:
            self._probed *= PROBE_MEMORY
            self._probed += self.block_chances.compared(outcomes.confidence, verified, accepted)
            came, expected, variance = self._probed
            if came - expected > SURPRISE * np.sqrt(max(variance, 1.0)):
                self._doubt_blocks()
        whole = np.full(len(made), self.max_draft)
        curves = expect(self.block_chances, of_those, outcomes.confidence[made], whole)
        samples = drafts_with_block(curves, found[made], self.promises[of_those])
        self.forecast.observe(of_those, curves, samples)
        self.block_chances.num_verified[rows] = verified
        learn_blocks(self.block_chances, rows, verified, accepted)
        if self._probe_charge:
            # A probe that has paid for itself can be repeated at once.
            worth = int(accepted.sum()) * self.costs.plain(len(rows)) / len(rows)
            self.probes.refund(min(worth, self._probe_charge))

    def _learn_texts(self, rows: Ints, step: StepRecord, outcomes: Outcomes, found: Floats) -> None:
        """Learn what became of the texts' predictions, and what to expect of those two steps from
        now; `found`: survival of what they predicted, [R, K]."""
        source, admitted, matches, lengths, known, came_true, *_ = outcomes
        ended = found[self._has_ended[rows] & (step.produced > 0)]  # [E, K], one after the other
        left = (1.0 - TYPICAL_RATE) ** np.arange(len(ended), -1, -1)
        self.typical_promise *= left[0]
        self.typical_promise += TYPICAL_RATE * left[1:] @ ended
        verified = np.where(source == TEXT, np.minimum(admitted, lengths), 0)
        self.text_chances.num_verified[rows] = verified
        learn(self.text_chances, rows, verified, known, came_true)
        goes_on = (known > 0) & (came_true == known)
        self._has_ended[rows] = ~goes_on
        # A match that has held so far is longer by the tokens produced. These outcomes are two
        # steps old when they are used, and all that is predicted now will be behind us: only a text
        # that repeats itself predicts more, its repeated part.
        lengths = lengths * goes_on
        going = expect_texts(self.text_chances, rows, matches + step.produced, lengths)
        last = going[np.arange(len(rows)), lengths - 1] * (lengths > 0)
        typical = self.typical_promise
        self.promises[rows] = typical + last[:, None] * (going - typical)

    def learned(self) -> Learned | None:
        """Return copies of what the device uses; None before `start` is called."""
        if not self.is_started:
            return None
        rates = self.block_chances.rates.copy(), self.text_chances.rates.copy()
        return Learned(*rates)
