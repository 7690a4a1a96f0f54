"""What a step costs: curves profiled at start-up, corrected by every measured step.

The target's seconds are a curve over its rows, plus what attention reads of contexts. Drafting and
storing context are a curve each. Steps show what the profile did not see (scheduling, sampling, a
machine that was busy): what they took, relative to it, is kept for steps with drafts and without,
by octaves of their rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_dflash.planning import Floats, Ints
from vllm_dflash.planning.step import StepRecord

LEARNING_RATE = 0.15
"""Share of the last measurement in a ratio, once there were several."""
LARGEST_SURPRISE = 0.3
"""Largest relative difference from its prediction that a measured time counts with. A step that was
interrupted, or met a batch size whose kernel had to be built, says nothing about the next."""
LEAST_RATIO = 0.5
"""Least time that a step is taken to need, whatever was learned, relative to the profile."""
CATCH_UP_STEPS = 64
"""Steps over which the cost of storing waiting context is spread: it is stored once."""
OCTAVES = 24
"""Octaves of rows that are told apart, from one row on."""


class Curve:
    """Seconds against a count: piecewise linear and non-decreasing."""

    def __init__(self, counts: Ints | Floats, seconds: Floats) -> None:
        """Take measured points; counts ascending. With a single one, the curve is flat."""
        self.counts = np.array(counts, np.float64)
        self.seconds = np.maximum.accumulate(np.array(seconds, np.float64))
        if len(self.counts) == 1:
            self.counts = np.append(self.counts, 2 * self.counts)
            self.seconds = self.seconds.repeat(2)

    def at(self, counts: Ints | Floats | float) -> Floats:
        """Return the seconds for each count; beyond the last point, the last slope goes on."""
        known, seconds = self.counts, self.seconds
        slope = (seconds[-1] - seconds[-2]) / (known[-1] - known[-2])
        beyond = np.maximum(np.asarray(counts) - known[-1], 0.0)
        found: Floats = np.interp(counts, known, seconds) + slope * beyond
        return found


class Ratios:
    """What something takes, relative to its profile, by octaves of its rows: as measured, and where
    nothing was, as in the nearest octave that was."""

    def __init__(self, otherwise: Ratios | None = None) -> None:
        """Start from the profile, or from other ratios until something is measured."""
        self._otherwise = otherwise
        self._values: Floats = np.ones(OCTAVES)
        self._is_known = np.zeros(OCTAVES, bool)
        self._likely = np.zeros(OCTAVES, np.int64)
        """Measurements that could be believed."""

    def at(self, rows: Ints | Floats | float) -> Floats:
        """Return the ratio for so many rows, [...]."""
        if self._otherwise is not None and not self._is_known.any():
            return self._otherwise.at(rows)
        found: Floats = self._values[_octaves(rows)]
        return found

    def has_seen(self, rows: int) -> bool:
        """Return whether about so many rows were measured."""
        return bool(self._likely[_octaves(rows)])

    def learn(self, rows: int, surprise: float) -> None:
        """Follow a measurement, which was so many times what was expected. The first ones count in
        full, together; those that cannot be believed do not make the next ones count less."""
        octave = _octaves(rows)
        likely = min(max(surprise - 1.0, -LARGEST_SURPRISE), LARGEST_SURPRISE)
        rate = max(LEARNING_RATE, 1.0 / (int(self._likely[octave]) + 1))
        self._values[octave] = max(float(self.at(rows)) * (1.0 + rate * likely), LEAST_RATIO)
        self._likely[octave] += likely == surprise - 1.0
        self._is_known[octave] = True
        known = np.flatnonzero(self._is_known)
        nearest = np.abs(np.arange(OCTAVES)[:, None] - known).argmin(axis=1)
        self._values = self._values[known[nearest]]


class Attention(NamedTuple):
    """Seconds that attention takes per token of context, on top of what rows cost."""

    plain: float = 0.0
    """Per token of context of a request that decodes, once a step."""
    draft: float = 0.0
    """The same, for each draft that is verified."""
    block: float = 0.0
    """The same, for a block that is drafted."""


NO_ATTENTION = Attention()


class StepCosts:
    """Seconds of a step in three parts: everything around the target, drafting, storing context."""

    def __init__(
        self,
        verify: Curve,
        draft: Curve,
        context: Curve,
        attention: Attention = NO_ATTENTION,
        first_draft_row: int = 1,
    ) -> None:
        """Start from profiled curves.

        Args:
            verify: target's forward against rows, with hardly any context.
            draft: drafter's block forward against rows, until its tokens are known.
            context: projecting and storing context against rows.
            attention: what tokens of context add.
            first_draft_row: row of a block that predicts the first draft.
        """
        self.first_draft_row = first_draft_row
        self.verify, self.draft, self.context, self.attention = verify, draft, context, attention
        self._plain, self._block, self._storing = Ratios(), Ratios(), Ratios()
        self._drafted = Ratios(otherwise=self._plain)
        """Of steps with drafts."""

    def target(
        self,
        num_requests: int,
        rows: Ints | Floats | float,
        context: float = 0.0,
        reading: Ints | Floats | float = 0.0,
    ) -> Floats:
        """Return the seconds of steps without drafting and storing context, [...].

        Args:
            num_requests: R, the same in all steps.
            rows: rows of the target: one for each request, plus the drafts to verify, [...].
            context: tokens of context of all requests.
            reading: tokens of context before each draft, summed, [...].
        """
        is_plain = np.asarray(rows) <= num_requests
        ratio = np.where(is_plain, self._plain.at(num_requests), self._drafted.at(rows))
        found: Floats = ratio * self._forward(rows, context, reading)
        return found

    def plain(self, num_requests: int, context: float = 0.0) -> float:
        """Return the seconds of a step that verifies nothing; storing its context can wait."""
        return float(self.target(num_requests, num_requests, context))

    def has_seen_plain(self, num_requests: int) -> bool:
        """Return whether steps of about so many requests without drafts were measured."""
        return self._plain.has_seen(num_requests)

    def blocks(
        self,
        count: Ints | int,
        width: Ints | int,
        context: Ints | Floats | float = 0.0,
        waiting: Ints | float = 0.0,
    ) -> Floats:
        """Return the seconds of drafting, and of storing the context that this needs, [...].

        Args:
            count: requests to draft, [...].
            width: drafts of each, [...].
            context: tokens of context of these requests, [...].
            waiting: context rows of theirs that were not stored so far, [...].
        """
        drafting = self._drafting(count * (self.first_draft_row + width), context)
        return drafting + self._storing_of(count + waiting / CATCH_UP_STEPS)

    def record_step(self, step: StepRecord, *, includes_block: bool = False) -> None:
        """Learn from a measured step that only decoded.

        `includes_block`: its `target_seconds` include the block of `draft_rows`, of all requests.
        """
        count, lens, drafted = step.num_requests, step.context_lens, step.plan.drafted
        context, reading = float(lens.sum()), float(lens @ step.verified)
        of_blocks = context if includes_block else float(lens[: len(drafted)] @ drafted)
        drafting = float(self._drafting(step.draft_rows, of_blocks)) if step.draft_rows else 0.0
        expected = float(self.target(count, step.rows, context, reading))
        measured = step.target_seconds - drafting * includes_block
        steps = self._plain if step.rows == count else self._drafted
        steps.learn(step.rows, measured / expected)
        if drafting and not includes_block:
            self._block.learn(step.draft_rows, step.draft_seconds / drafting)
        storing = float(self._storing_of(step.context_rows)) if step.context_rows else 0.0
        if storing:
            self._storing.learn(step.context_rows, step.context_seconds / storing)

    def _forward(
        self, rows: Ints | Floats | float, context: float, reading: Ints | Floats | float
    ) -> Floats:
        """Return what the profile expects of the target's forward, [...]."""
        read = self.attention.plain * context + self.attention.draft * np.asarray(reading)
        found: Floats = self.verify.at(rows) + read
        return found

    def _drafting(self, rows: Ints | int, context: Ints | Floats | float) -> Floats:
        """Return the seconds of blocks with so many rows and tokens of context, [...]."""
        profiled = self.draft.at(rows) + self.attention.block * np.asarray(context)
        found: Floats = self._block.at(rows) * profiled
        return found

    def _storing_of(self, rows: Ints | Floats | float) -> Floats:
        """Return the seconds of storing so many rows of context, [...]."""
        found: Floats = self._storing.at(rows) * self.context.at(rows)
        return found


def _octaves(rows: Ints | Floats | float) -> Ints:
    """Return the octaves of so many rows, [...]."""
    found: Ints = np.rint(np.log2(rows)).astype(np.int64)
    return found
