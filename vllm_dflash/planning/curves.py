"""Curves of seconds against a count: piecewise linear, profiled, corrected by measurements."""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_dflash.planning import Floats, Ints, Records
from vllm_dflash.planning.compiled import compiled

LARGEST_SURPRISE = 0.3
"""Largest relative difference from its prediction that a measured time counts with. A step that was
interrupted, or met a batch size whose kernel had to be built, says nothing about the next."""
FAR_SHARE = 0.15
"""Share of a correction that reaches points far from the measured one: a machine that gets slower
gets slower everywhere."""
MOST_POINTS = 64
CURVE = np.dtype(
    [("num_points", "i8"), ("counts", "f8", (MOST_POINTS,)), ("seconds", "f8", (MOST_POINTS,))]
)
"""Counts, ascending, and their seconds, non-decreasing."""
Record = Any
"""An entry of such an array. It is one argument for all that is known: each argument costs a
compiled function as much as some dozen points of a curve. Changes to it reach the array."""


@compiled
def seconds_at(curve: Record, count: float) -> float:
    """Return the seconds: linear between points; beyond the last one, the last slope goes on."""
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
    lowest, octaves = 0.0, np.empty(curve.num_points)
    for point in range(curve.num_points):
        octaves[point] = abs(np.log2(max(curve.counts[point], 0.5)) - np.log2(max(count, 0.5)))
    for point in range(curve.num_points):
        share = max(FAR_SHARE, 1.0 - (octaves[point] - octaves.min()))
        lowest = max(lowest, curve.seconds[point] * (1.0 + rate * share * surprise))
        curve.seconds[point] = lowest


class Curve:
    """Seconds against a count: piecewise linear, non-decreasing, corrected where it is used."""

    def __init__(self, records: Records) -> None:
        """Use the curve in `records`, an array of one, through views."""
        num_points, self.records = int(records["num_points"][0]), records
        self.counts: Floats = records["counts"][0, :num_points]
        self.seconds: Floats = records["seconds"][0, :num_points]

    @classmethod
    def of(cls, counts: Ints | Floats, seconds: Floats) -> Curve:
        """Start from measured points; counts ascending, at least two."""
        records = np.zeros(1, CURVE)
        records["num_points"] = len(counts)
        curve = cls(records)
        curve.counts[:], curve.seconds[:] = counts, np.maximum.accumulate(seconds)
        return curve

    def at(self, counts: Ints | Floats | float) -> Floats:
        """Return the seconds for each count; beyond the last point, the last slope goes on."""
        known, seconds = self.counts, self.seconds
        wanted = np.maximum(counts, known[0])
        lower = np.minimum(np.searchsorted(known, wanted, side="right"), len(known) - 1) - 1
        slopes = (seconds[lower + 1] - seconds[lower]) / (known[lower + 1] - known[lower])
        return seconds[lower] + (wanted - known[lower]) * slopes
