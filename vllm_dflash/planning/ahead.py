"""Draft lengths on Model Runner V2, planned a step before anybody knows what they will be for.

There the device decides what each request's drafts are, a block's or its text's, and where it can
trim them, which of them are verified. The host says whether a block is run at all, and how many
places drafts get, from what it knew two steps ago: how confident recent blocks were, how far texts
had matched, what became of both, and what steps take.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from vllm_dflash.planning import Floats, Ints, Records
from vllm_dflash.planning.chances import Chances, expect, expect_texts, learn_blocks
from vllm_dflash.planning.costs import StepCosts
from vllm_dflash.planning.estimates import Estimates
from vllm_dflash.planning.forecast import Forecast
from vllm_dflash.planning.planner import CLOSE, MARGIN, PROBE_LENGTH, PROBE_SHARE
from vllm_dflash.planning.probing import ProbeSchedule
from vllm_dflash.planning.prospects import Expected, Rules, prospects_of, seen_with_a_block
from vllm_dflash.planning.request_rows import RequestRows
from vllm_dflash.planning.step import Predicted, Step, StepEstimate
from vllm_dflash.planning.text_promises import TextPromises, learn_promises

OLD_TOKENS = 24.0
"""What all that was seen before is worth beside probes that contradict it."""
SURPRISE, PROBE_MEMORY = 3.0, 0.5
"""Standard deviations from which on they do, and what is left of a probe after another one."""
LEAST_PROBED = 0.005
"""Of the time, that probes take in the long run: blocks are run of all requests or of nobody."""
NOBODY, BLOCK, TEXT = 0, 1, 2
"""Whose a request's drafts are; placeholders of vLLM's are nobody's."""


class Outcomes(NamedTuple):
    """What became of the drafts of R requests, as the device saw it."""

    source: Ints
    """Whose they were, [R]."""
    admitted: Ints
    """Drafts that were verified, [R]."""
    matches: Ints
    """Tokens that stood before, of the last look-up, [R]."""
    text_lengths: Ints
    """Tokens that it predicted, [R]."""
    known: Ints
    """Of those: how many there is a true one for, [R]."""
    came_true: Ints
    """Of those: how many first ones were right, [R]."""
    confidence: Floats
    """The drafter's, in its last block; 0: there was none, or a draft was not finite, [R, K]."""

    @classmethod
    def of(cls, table: Floats) -> Outcomes:
        """The device's table, [R, 6 + K]."""
        source, admitted, matches, lengths, known, came_true = table[:, :6].astype(np.int64).T
        confidence = table[:, 6:].astype(np.float64)
        return cls(source, admitted, matches, lengths, known, came_true, confidence)

    def of_rows(self, rows: Sequence[int]) -> Outcomes:
        """Of some requests."""
        source, admitted, matches, lengths, known, came_true = (one[rows] for one in self[:6])
        return Outcomes(source, admitted, matches, lengths, known, came_true, self.confidence[rows])


class Learned(NamedTuple):
    """What workers are told now and then, copies."""

    costs: Records
    """Of `StepCosts`, [1]."""
    block_rates: Floats
    """Acceptance by position and confidence, [K, knots]; see `Chances`."""
    text_rates: Floats
    """The same of free drafts, [K, knots]."""


@dataclass(frozen=True)
class Ahead:
    """What the drafts of a step's R requests are to be, which the next step verifies."""

    lengths: Ints
    """Places for drafts of each, [R]."""
    runs_block: bool = False
    least: int = 0
    """Drafts to verify, whatever they seem worth."""
    rate: float = 0.0
    """Tokens a second that it promises."""


class AheadPlanner:
    """State and decisions of one engine. Until it is started, every step drafts K."""

    def __init__(self, max_draft: int, max_requests: int, *, looks_up: bool = False) -> None:
        """Plan for up to `max_draft` drafts (K) of each of up to `max_requests` requests.

        With `looks_up`, texts may give the drafts.
        """
        self.max_draft, self.looks_up = max_draft, looks_up
        self.costs: StepCosts | None = None
        self.speedup = 1.0
        """Expected rate against plain decoding, with what was planned last."""
        self.probes = ProbeSchedule(LEAST_PROBED)
        num_rows = 2 * max_requests
        self.blocks = Chances.of(max_draft, num_rows)
        self.texts = Chances.of(max_draft, num_rows)
        self.forecast = Forecast(max_draft, num_rows)
        self._requests = RequestRows(num_rows)
        self._promises = TextPromises.of(num_rows, max_draft)
        self._nothing = np.zeros((num_rows, max_draft))
        self._rules = Rules(np.arange(1, max_draft + 1), False, 0.0)
        self._probe_charge = 0.0
        self._probed: Floats = np.zeros(3)
        """Drafts of probes that were accepted, were expected to be, and the variance of that."""

    def start(
        self,
        costs: StepCosts,
        choices: Iterable[int],
        *,
        trims: bool = False,
        ragged_seconds: float = 0.0,
    ) -> None:
        """From now on choose by what steps cost.

        Args:
            costs: to start from.
            choices: lengths that all requests of a step can be given alike.
            trims: whether the device verifies only those drafts that are worth it.
            ragged_seconds: what a step takes longer whose requests have different lengths.
        """
        self.costs = costs
        lengths = np.array(sorted({*choices} - {0}), dtype=np.int64)
        self._rules = Rules(lengths, trims, float(ragged_seconds))

    @property
    def trims(self) -> bool:
        """Whether the device verifies only those drafts that are worth it."""
        return self._rules.trims

    # --- before a step ----------------------------------------------------------------------

    def plan(self, ids: Sequence[str], context_lens: Ints, limits: Ints | None = None) -> Ahead:
        """What to draft in a step of R requests.

        Args:
            ids: of the requests, [R].
            context_lens: tokens of context of each, as far as is known, [R].
            limits: drafts that each can use at most, [R]; None: all can use K.
        """
        limits = np.full(len(ids), self.max_draft) if limits is None else limits
        if self.costs is None or not len(ids):
            return Ahead(limits, runs_block=True)
        rows, count = self._rows(ids), len(ids)
        summary = self.forecast.summary
        scores = self.forecast.scores(rows)
        promised = self._promises.survival[rows]
        expected = Expected(context_lens, limits, promised, scores, *summary[:3])
        costs, rules = self.costs.records, self._rules
        rest_seconds, texts, blocks = prospects_of(costs, expected, rules, self.looks_up)
        plain = count / rest_seconds
        chosen = Ahead(np.zeros(count, np.int64), rate=plain)
        best = max(texts, blocks, key=lambda one: one.rate)
        if best.rate > MARGIN * plain:
            chosen = Ahead(best.lengths, best is blocks, rate=best.rate)
        self.speedup = chosen.rate / plain
        if chosen.runs_block:
            self.probes.restart()
            self._probe_charge = 0.0
            return chosen
        is_close = blocks.rate > CLOSE * chosen.rate
        return self._probe(expected, chosen, rest_seconds, is_close) or chosen

    def _probe(
        self, expected: Expected, chosen: Ahead, rest_seconds: float, is_close: bool
    ) -> Ahead | None:
        """Now and then a block although it does not pay, to notice when it does."""
        assert self.costs is not None
        limits, context = expected.limits, float(expected.context_lens.sum())
        count, length = len(limits), min(PROBE_LENGTH, self.max_draft)
        tried = min(count, 1 + count // PROBE_SHARE)
        lengths, least = np.maximum(limits, chosen.lengths), length * tried
        if not self.trims:
            lengths = chosen.lengths.copy()
            if self._rules.ragged_seconds:
                tried, choices = count, self._rules.choices
                length = int(choices[np.searchsorted(choices, length)])
            able = np.argsort(-limits, kind="stable")[:tried]
            lengths[able] = np.maximum(lengths[able], np.minimum(length, limits[able]))
            least = 0
        if not lengths.any():
            return None
        rows = np.array([count, count + length * tried])
        plain, verifying = self.costs.decoding(count, rows, context).tolist()
        drafting = self.costs.block(count * (1 + self.max_draft), context)
        self._probe_charge = drafting + verifying - plain
        if not self.probes.is_due(rest_seconds, self._probe_charge, is_close=is_close):
            return None
        return replace(chosen, lengths=lengths, runs_block=True, least=least)

    # --- when its outcome is there --------------------------------------------------------------

    def observe(self, step: Step, outcomes: Outcomes | None) -> StepEstimate | None:
        """Learn from a step: what became of the drafts it verified, and what it took.

        `target_seconds` counts where it is known: it holds the block whose rows are `draft_rows`,
        because nobody can time that alone while the device works on. Returns what was expected of
        the step without that block, where it is known.
        """
        if self.costs is None:
            return None  # lengths are fixed: nobody would go by it
        if outcomes is not None and len(step.ids):
            self._learn(step, outcomes)
        self.costs.observe_batch(step.prompt_rows)
        if not step.target_seconds:
            return None
        drafting = self.costs.block(step.draft_rows, float(step.context_lens.sum()))
        seconds = step.target_seconds - drafting
        return self.costs.observe(replace(step, target_seconds=seconds, draft_rows=0))

    def _learn(self, step: Step, outcomes: Outcomes) -> None:
        rows = self._rows(step.ids)
        source, admitted, matches, lengths, known, came_true, confidence = outcomes
        found: Floats = self._nothing[: len(rows)]
        if self.looks_up:
            found = expect_texts(self.texts, rows, matches, lengths)
        if confidence[:, 0].any():
            self._learn_blocks(rows, step, outcomes, found)
        if self.looks_up:
            verified = np.where(source == TEXT, np.minimum(admitted, lengths), 0)
            predicted = Predicted(lengths, matches, known, came_true)
            learn_promises(
                self._promises, self.texts, rows, step.produced, verified, predicted, found
            )

    def _learn_blocks(self, rows: Ints, step: Step, outcomes: Outcomes, found: Floats) -> None:
        made = np.flatnonzero(outcomes.confidence[:, 0] > 0.0)
        of_those = rows[made]
        verified = np.where(outcomes.source == BLOCK, outcomes.admitted, 0)
        accepted = np.where(verified > 0, step.produced - 1, 0)
        if self._probe_charge and self._is_better(outcomes.confidence, verified, accepted):
            self.blocks.keep(OLD_TOKENS)
            self.forecast.restart()
        whole = np.full(len(made), self.max_draft)
        curves = expect(self.blocks, of_those, outcomes.confidence[made], whole)
        promised = self._promises.survival[of_those]
        seen = seen_with_a_block(curves, found[made], promised)
        self.forecast.observe(of_those, curves, seen)
        self.blocks.num_verified[rows] = verified
        learn_blocks(self.blocks, rows, verified, accepted)
        if self._probe_charge:
            assert self.costs is not None
            # A probe that has paid for itself can be repeated at once.
            worth = int(accepted.sum()) * self.costs.plain(len(rows)) / len(rows)
            self.probes.refund(min(worth, self._probe_charge))

    def _is_better(self, confidence: Floats, verified: Ints, accepted: Ints) -> bool:
        """Whether probes lately fared better than all that was seen before would have it."""
        rates = self.blocks.acceptance(confidence)
        tried = np.arange(self.max_draft) < np.minimum(accepted + 1, verified)[:, None]  # [R, K]
        expected, variance = (tried * rates).sum(), (tried * rates * (1.0 - rates)).sum()
        self._probed *= PROBE_MEMORY
        self._probed += (accepted.sum(), expected, variance)
        came, expected, variance = self._probed
        return bool(came - expected > SURPRISE * np.sqrt(max(variance, 1.0)))

    def _rows(self, ids: Sequence[str]) -> Ints:
        rows, fresh = self._requests.of(ids)
        if len(fresh):
            self.forecast.forget(fresh)
            self.blocks.forget(fresh)
            self.texts.forget(fresh)
            self._promises.forget(fresh)
        return rows

    # --- what others are told -------------------------------------------------------------------

    def learned(self) -> Learned | None:
        """Copies of what the device and its budget go by; None before it is started."""
        if self.costs is None:
            return None
        rates = self.blocks.rates.copy(), self.texts.rates.copy()
        return Learned(self.costs.records.copy(), *rates)

    def estimates(self) -> Estimates:
        """What was learned, for another run to recall. Asked once it is started."""
        assert self.costs is not None
        block, bias = self.blocks, self.blocks.bias_of_all
        of_texts = np.stack([self.texts.seen, self.texts.accepted])
        return Estimates(self.costs, block.seen, block.accepted, bias, of_texts)

    def recall(self, estimates: Estimates) -> None:
        """Start from what another run has learned of drafts; `start` is given the costs."""
        self.blocks.recall(estimates.seen, estimates.accepted)
        self.blocks.bias_of_all[:] = estimates.bias
        if self.looks_up and estimates.free.shape[1] == self.max_draft:
            self.texts.recall(*estimates.free)
