"""What a step costs: curves profiled at start-up, corrected by every measured step.

The target's seconds are a curve over its rows, plus what attention reads of contexts. Steps show
what the profile did not see (scheduling, sampling, a machine that was busy): a level of steps
without drafts, for each number of requests, and a line that corrects what drafts add. Drafting and
storing context are a curve each.
"""

from __future__ import annotations

from math import log2
from typing import Any, NamedTuple

import numpy as np

from vllm_dflash.planning import Floats, Ints
from vllm_dflash.planning.step import StepRecord

LEVEL_RATE = 0.15
"""Share of the last measurement in a level or a curve, once there were several."""
LINE_MEMORY = 0.98
"""What is left of a step with drafts after the next one."""
PRIOR_STEPS = 1.0
"""Steps that the profile is worth in what drafts add."""
MOST_SLOPE = 4.0
"""Most times that the profile can be wrong about that."""
LARGEST_SURPRISE = 0.3
"""Largest relative difference from its prediction that a measured time counts with. A step that was
interrupted, or met a batch size whose kernel had to be built, says nothing about the next."""
FAR_SHARE = 0.15
"""Share of a correction that reaches points far from the measured one: a machine that gets slower
gets slower everywhere."""
LEVEL_NOISE = 0.03
"""Measurement noise: a step with drafts may seem up to 3% faster than one without."""
CATCH_UP_STEPS = 64
"""Steps over which the cost of storing waiting context is spread: it is stored once."""


class Curve:
    """Seconds against a count: piecewise linear, non-decreasing, corrected where it is used."""

    def __init__(self, counts: Ints | Floats, seconds: Floats) -> None:
        """Start from measured points; counts ascending. With a single one, the curve is flat."""
        self.counts = np.array(counts, np.float64)
        self.seconds = np.maximum.accumulate(np.array(seconds, np.float64))
        if len(self.counts) == 1:
            self.counts = np.append(self.counts, 2 * self.counts)
            self.seconds = self.seconds.repeat(2)
        self._octaves = np.log2(np.maximum(self.counts, 0.5))
        self._seen = np.ones_like(self.seconds)  # measurements near each point; one for the profile

    def at(self, counts: Ints | Floats | float) -> Floats:
        """Return the seconds for each count; beyond the last point, the last slope goes on."""
        known, seconds = self.counts, self.seconds
        slope = (seconds[-1] - seconds[-2]) / (known[-1] - known[-2])
        beyond = np.maximum(np.asarray(counts) - known[-1], 0.0)
        found: Floats = np.interp(counts, known, seconds) + slope * beyond
        return found

    def correct(self, count: float, seconds: float) -> None:
        """Move the curve towards a measurement, most near its count, and more by the first ones."""
        predicted = float(self.at(count))
        if predicted <= 0.0:
            return
        surprise = min(max(seconds / predicted - 1.0, -LARGEST_SURPRISE), LARGEST_SURPRISE)
        far = np.abs(self._octaves - np.log2(max(count, 0.5)))
        near = np.maximum(FAR_SHARE, 1.0 - (far - far.min()))
        self._seen += near
        shares = np.maximum(LEVEL_RATE, 1.0 / self._seen) * near
        self.seconds = np.maximum.accumulate(self.seconds * (1.0 + shares * surprise))


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
        max_requests: int,
        attention: Attention = NO_ATTENTION,
        first_draft_row: int = 1,
    ) -> None:
        """Start from profiled curves.

        Args:
            verify: target's forward against rows, with hardly any context.
            draft: drafter's block forward against rows, until its tokens are known.
            context: projecting and storing context against rows.
            max_requests: the largest batch.
            attention: what tokens of context add.
            first_draft_row: row of a block that predicts the first draft.
        """
        self.first_draft_row = first_draft_row
        self.verify, self.draft, self.context, self.attention = verify, draft, context, attention
        octaves = max_requests.bit_length() + 1
        # At 1, 2, 4, ... requests: seconds of steps without drafts that the profile did not see;
        # how many such steps were seen; and of steps with drafts, for `_line`: count, and sums of
        # x (seconds that the profile expects drafts to add), y (seconds beyond the profile of a
        # plain step), x * x and x * y. Lists, which are faster than arrays of a few numbers.
        self._levels, self._seen = [0.0] * octaves, [0.0] * octaves
        self._sums = [[0.0] * 5 for _ in range(octaves)]

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
        alone, added = self._forward(num_requests, rows, context, reading)
        intercept, slope = self._line(_octave(num_requests))
        drafts = np.maximum(intercept + slope * added, 0.0) * (np.asarray(rows) > num_requests)
        # No step takes less than half its forward pass, whatever was learned elsewhere.
        found: Floats = np.maximum(
            self._level(num_requests) + alone + drafts, 0.5 * (alone + added)
        )
        return found

    def plain(self, num_requests: int, context: float = 0.0) -> float:
        """Return the seconds of a step that verifies nothing; storing its context can wait."""
        return float(self.target(num_requests, num_requests, context))

    def has_seen_plain(self, num_requests: int) -> bool:
        """Return whether steps of about so many requests without drafts were measured."""
        return bool(self._seen[_octave(num_requests)] >= 1.0)

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
        storing = self.context.at(count + waiting / CATCH_UP_STEPS)
        drafting: Floats = self._drafting(count * (self.first_draft_row + width), context)
        return drafting + storing

    def record_step(self, step: StepRecord, *, includes_block: bool = False) -> None:
        """Learn from a measured step that only decoded.

        `includes_block`: its `target_seconds` include the block of `draft_rows`, of all requests.
        """
        count, lens, drafted = step.num_requests, step.context_lens, step.plan.drafted
        context, reading = float(lens.sum()), float(lens @ step.verified)
        of_blocks = context if includes_block else float(lens[: len(drafted)] @ drafted)
        drafting = float(self._drafting(step.draft_rows, of_blocks)) if step.draft_rows else 0.0
        inferred = drafting if includes_block else 0.0
        forward, added = self._forward(count, step.rows, context, reading)
        expected = float(self.target(count, step.rows, context, reading))
        measured = max(step.target_seconds - inferred, 0.5 * (forward + float(added)))
        likely = min(measured, (1.0 + LARGEST_SURPRISE) * expected)
        if step.rows == count:
            is_likely = likely == measured
            self._learn_plain(count, likely - expected, is_likely=is_likely)
        else:
            plain = self.plain(count, context)
            self._learn_drafts(step, float(added), likely - forward, plain, inferred)
        if step.draft_rows and not includes_block:
            own = step.draft_seconds - self.attention.block * of_blocks
            self.draft.correct(step.draft_rows, own)
        if step.context_rows:
            self.context.correct(step.context_rows, step.context_seconds)

    def _forward(
        self, num_requests: int, rows: Any, context: float, reading: Any
    ) -> tuple[float, Floats]:
        """Return what the profile expects of the target's forward without drafts, and what it
        expects drafts to add, [...]."""
        own = float(self.verify.at(num_requests))
        added: Floats = self.verify.at(rows) - own + self.attention.draft * np.asarray(reading)
        return own + self.attention.plain * context, added

    def _drafting(self, rows: Any, context: Any) -> Floats:
        """Return the seconds of blocks with so many rows and tokens of context, [...]."""
        found: Floats = self.draft.at(rows) + self.attention.block * np.asarray(context)
        return found

    def _level(self, num_requests: int) -> float:
        """Return what the profile did not see of steps without drafts: where such a number of
        requests was not measured, what was at the nearest one."""
        return self._levels[_nearest(self._seen, _octave(num_requests))]

    def _line(self, octave: int) -> tuple[float, float]:
        """Return intercept and slope of the seconds that drafts add, over those that the profile
        expects: least squares over the last steps, which start from 0 and 1."""
        nearest = _nearest([count for count, *_ in self._sums], octave)
        count, x, y, xx, xy = self._sums[nearest]
        if not count:
            return 0.0, 1.0
        level = self._levels[_nearest(self._seen, nearest)]
        y, xy = y - level * count, xy - level * x
        prior = PRIOR_STEPS * xx / count
        determinant = (count + PRIOR_STEPS) * (xx + prior) - x * x
        if determinant <= 0.0:
            return y / (count + PRIOR_STEPS), 1.0
        slope = ((count + PRIOR_STEPS) * (xy + prior) - x * y) / determinant
        slope = min(max(slope, 1.0 / MOST_SLOPE), MOST_SLOPE)
        return (y - slope * x) / (count + PRIOR_STEPS), slope

    def _learn_plain(self, num_requests: int, surprise: float, *, is_likely: bool) -> None:
        """Correct the level: the first measurements count in full, later ones by `LEVEL_RATE`. One
        that counted with less than it was does not make those that follow count less."""
        octave = _octave(num_requests)
        rate = max(LEVEL_RATE, 1.0 / (self._seen[octave] + 1.0))
        self._shift(octave, rate * surprise)
        self._seen[octave] += is_likely

    def _learn_drafts(
        self, step: StepRecord, added: float, beyond: float, plain: float, inferred: float
    ) -> None:
        """Correct what drafts add.

        Args:
            step: a step that verified some.
            added: seconds that the profile expects them to add.
            beyond: seconds that the step took beyond the profile's of a plain one.
            plain: seconds that a plain one is expected to take.
            inferred: estimated time of a block that was subtracted for that.
        """
        octave = _octave(step.num_requests)
        new = 1.0, added, beyond, added * added, added * beyond
        sums = zip(self._sums[octave], new, strict=True)
        self._sums[octave] = [LINE_MEMORY * old + one for old, one in sums]
        # Drafts make no step faster. Where they seem to although a block took no time, steps
        # without drafts were measured while the machine was slower, and would not be measured
        # again soon. Else the block takes less than was subtracted for it.
        intercept, slope = self._line(octave)
        drafts = intercept + slope * added + LEVEL_NOISE * plain
        if drafts + inferred < 0.0:
            self._shift(octave, drafts + inferred)
        elif drafts < 0.0:
            self.draft.correct(step.draft_rows, float(self.draft.at(step.draft_rows)) + drafts)

    def _shift(self, octave: int, seconds: float) -> None:
        """Change the level, and so what drafts were seen to add to it."""
        self._levels[octave] = self._levels[_nearest(self._seen, octave)] + seconds
        self._seen[octave] = max(self._seen[octave], 1e-9)  # seen, but the next step counts in full


def _octave(num_requests: int) -> int:
    return round(log2(num_requests))


def _nearest(seen: list[float], octave: int) -> int:
    """Return the octave that was seen which is nearest to this one; this one if none was."""
    if seen[octave]:
        return octave
    found = [each for each, count in enumerate(seen) if count]
    return min(found, key=lambda each: abs(each - octave), default=octave)
