"""Seconds against a count: measured curves, and levels that are learned from nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_dflash.planning import Floats, Ints, Records
from vllm_dflash.planning.compiled import compiled

LARGEST_SURPRISE = 0.3
"""A measured time counts as at most this much, relatively, off its prediction: a step that was
interrupted, or met a batch size whose kernel had to be built, says nothing about the next."""
CURVE_RATE = 0.05
LEVEL_RATE = 0.15
FAR_SHARE = 0.15
"""Part of a correction that reaches points far from the measured one: a machine that gets slower
gets slower everywhere."""


@compiled
def repeated(rate: float, times: int) -> float:
    """The rate that goes as far in one correction as `rate` does in several."""
    return 1.0 - (1.0 - rate) ** times


MOST_POINTS, MOST_OCTAVES = 64, 24
CURVE = np.dtype(
    [("num_points", "i8"), ("counts", "f8", (MOST_POINTS,)), ("seconds", "f8", (MOST_POINTS,))]
)
"""Counts, ascending, and their seconds, non-decreasing."""
LEVEL = np.dtype(
    [("num_points", "i8"), ("seconds", "f8", (MOST_OCTAVES,)), ("seen", "f8", (MOST_OCTAVES,))]
)
"""Seconds at 1, 2, 4, ... requests, and how many steps were seen there."""
Record = Any
"""A numpy record: one argument for all that is known, since each one costs a compiled function as
much as some dozen points of a curve. Changes reach the array it is an entry of."""


@compiled
def seconds_at(curve: Record, count: float) -> float:
    """Between two points linear; beyond the last one the last slope goes on."""
    counts, seconds = curve.counts, curve.seconds
    if count <= counts[0]:
        return seconds[0]
    lower, upper = 0, curve.num_points - 1
    while upper - lower > 1:
        middle = (lower + upper) // 2
        if counts[middle] <= count:
            lower = middle
        else:
            upper = middle
    slope = (seconds[upper] - seconds[lower]) / (counts[upper] - counts[lower])
    return seconds[lower] + (count - counts[lower]) * slope


@compiled
def correct_curve(curve: Record, count: float, seconds: float, rate: float) -> None:
    """Move the curve towards a measurement, most near its count."""
    predicted = seconds_at(curve, count)
    if predicted <= 0.0:
        return
    surprise = min(max(seconds / predicted - 1.0, -LARGEST_SURPRISE), LARGEST_SURPRISE)
    octave = np.log2(max(count, 0.5))
    nearest = np.inf
    for point in range(curve.num_points):
        nearest = min(nearest, abs(np.log2(max(curve.counts[point], 0.5)) - octave))
    least = 0.0
    for point in range(curve.num_points):
        octaves = abs(np.log2(max(curve.counts[point], 0.5)) - octave)
        share = max(FAR_SHARE, 1.0 - (octaves - nearest))
        least = max(least, curve.seconds[point] * (1.0 + rate * share * surprise))
        curve.seconds[point] = least


class Curve:
    """Seconds against a count: piecewise linear, non-decreasing, corrected where it is used."""

    def __init__(self, counts: Ints | Floats, seconds: Floats) -> None:
        """Start from measured points; counts ascending, at least two."""
        self.records = np.zeros(1, CURVE)
        self.records["num_points"] = len(counts)
        self.counts[:] = counts
        self.seconds[:] = np.maximum.accumulate(seconds)

    @classmethod
    def of(cls, records: Records) -> Curve:
        """The curve in an array of one."""
        curve = cls.__new__(cls)
        curve.records = records
        return curve

    @property
    def counts(self) -> Floats:
        """[P]."""
        return self.records["counts"][0, : self.records["num_points"][0]]

    @property
    def seconds(self) -> Floats:
        """[P]."""
        return self.records["seconds"][0, : self.records["num_points"][0]]

    def at(self, counts: Ints | Floats | float) -> Floats:
        """Seconds for each count; beyond the last point the last slope goes on."""
        return np.vectorize(self.at_one, otypes=[float])(counts)

    def at_one(self, count: float) -> float:
        """The same for a single count."""
        return seconds_at(self.records[0], float(count))

    def correct(self, count: float, seconds: float, rate: float = CURVE_RATE) -> None:
        """Move the curve towards a measurement, most near its count."""
        correct_curve(self.records[0], float(count), float(seconds), rate)


@compiled
def level_at(level: Record, num_requests: int) -> float:
    """Seconds for that many requests: linear between powers of two."""
    octave = min(np.log2(num_requests), level.num_points - 1.0)
    lower = min(int(octave), level.num_points - 2)
    share = octave - lower
    return level.seconds[lower] + share * (level.seconds[lower + 1] - level.seconds[lower])


@compiled
def is_level_known(level: Record, num_requests: int) -> bool:
    """Whether steps of about that many requests were seen."""
    return level.seen[round(np.log2(num_requests))] > 0


@compiled
def correct_level(level: Record, num_requests: int, surprise: float, num_steps: int) -> None:
    """Move towards steps that took, in the mean, `surprise` seconds longer than predicted.

    The first measurements count in full, later ones by `LEVEL_RATE`. Numbers of requests that
    were never seen follow their nearest seen neighbour, of two the smaller one.
    """
    octave = np.log2(num_requests)
    steady = repeated(LEVEL_RATE, num_steps)
    for point in range(level.num_points):
        share = max(0.0, 1.0 - abs(point - octave))
        rate = max(steady, num_steps / (level.seen[point] + num_steps))
        level.seconds[point] += rate * share * surprise
        level.seen[point] += share * num_steps
    for point in range(level.num_points):
        nearest, octaves = point, np.inf
        for known in range(level.num_points):
            if level.seen[known] > 0 and abs(known - point) < octaves:
                nearest, octaves = known, abs(known - point)
        level.seconds[point] = level.seconds[nearest]


class LearnedTime:
    """An additive time by number of requests, learned from nothing; may be negative."""

    def __init__(self, max_requests: int) -> None:
        self.records = np.zeros(1, LEVEL)
        self.records["num_points"] = int(np.ceil(np.log2(max(max_requests, 2)))) + 1

    @classmethod
    def of(cls, records: Records) -> LearnedTime:
        """The level in an array of one."""
        level = cls.__new__(cls)
        level.records = records
        return level

    def at(self, num_requests: int) -> float:
        """Seconds for that many requests."""
        return level_at(self.records[0], num_requests)

    def is_known(self, num_requests: int) -> bool:
        """Whether steps of about that many requests were seen."""
        return is_level_known(self.records[0], num_requests)

    def correct(self, num_requests: int, surprise: float, num_steps: int) -> None:
        """Move towards steps that took, in the mean, `surprise` seconds longer than predicted."""
        correct_level(self.records[0], num_requests, float(surprise), num_steps)
