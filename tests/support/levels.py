"""Curves and levels of costs, corrected by hand."""

from __future__ import annotations

import numpy as np

from support.planner_world import straight
from vllm_dflash.planning.costs import StepCosts, correct_level
from vllm_dflash.planning.curves import Curve, correct_curve
from vllm_dflash.planning.step import StepEstimate, StepRecord


def correct(curve: Curve, count: float, seconds: float, rate: float) -> None:
    """Correct a curve towards a measurement."""
    correct_curve(curve.records[0], float(count), float(seconds), rate)


def estimate_of(costs: StepCosts, step: StepRecord) -> StepEstimate:
    """Return the estimate of a step that did as much as this one."""
    return StepCosts(costs.records.copy()).observe(step)


class Level:
    """Time of a step beyond its forward pass, by number of requests."""

    def __init__(self, costs: StepCosts, name: str = "plain_level") -> None:
        self.record = costs.records[0][name]

    @classmethod
    def fresh(cls, max_requests: int) -> Level:
        """Return a level that has learned nothing."""
        free = straight(0, 0)
        return cls(StepCosts.of(free, free, free, max_requests))

    def at(self, num_requests: int) -> float:
        """Return seconds, linear between powers of two."""
        points = int(self.record["num_points"])
        return float(
            np.interp(np.log2(num_requests), np.arange(points), self.record["seconds"][:points])
        )

    def correct(self, num_requests: int, surprise: float, num_steps: int) -> None:
        """Correct it towards steps that took `surprise` longer than predicted."""
        correct_level(self.record, num_requests, float(surprise), num_steps)
