"""Seconds against a count: measured curves, corrected where they are used."""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_dflash.planning import Floats, Ints, Records
from vllm_dflash.planning.compiled import compiled

LARGEST_SURPRISE = 0.3
"""A measured time counts as at most this much, relatively, off its prediction: a step that was
interrupted, or met a batch size whose kernel had to be built, says nothing about the next."""
FAR_SHARE = 0.15
"""Part of a correction that reaches points far from the measured one: a machine that gets slower
gets slower everywhere."""
MOST_POINTS = 64
CURVE = np.dtype(
    [("num_points", "i8"), ("counts", "f8", (MOST_POINTS,)), ("seconds", "f8", (MOST_POINTS,))]
)
"""Counts, ascending, and their seconds, non-decreasing."""
Record = Any
"""An entry of such an array: one argument for all that is known, since each one costs a compiled
function as much as some dozen points of a curve. Changes reach the array."""


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
