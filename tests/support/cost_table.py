"""Step costs of another machine, from a JSON file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vllm_dflash.planning.costs import NO_ATTENTION, Attention, Curve, StepCosts

COSTS = Path(__file__).parents[2] / "benchmarks" / "costs"


class CostTable(NamedTuple):
    """Seconds against rows."""

    name: str
    """Name of the machine and the models."""
    verify: Curve
    """Seconds of the target's step."""
    draft: Curve
    """Seconds of the drafter's blocks."""
    context: Curve
    """Seconds of storing context."""

    @classmethod
    def read(cls, name: str) -> CostTable:
        """Read the costs of `assumed_gpu` or `cpu_2_cores`."""
        table = json.loads((COSTS / f"{name}.json").read_text())
        verify, draft, context = (
            Curve(np.array([*map(int, points)]), np.array([*points.values()]) / 1000)
            for points in (table["verify_ms"], table["draft_ms"], table["context_ms"])
        )
        return cls(table["name"], verify, draft, context)

    def costs(
        self, max_requests: int, attention: Attention = NO_ATTENTION, scale: float = 1.0
    ) -> StepCosts:
        """Return the costs that a planner starts from; `scale`: factor of the target's."""
        verify = Curve(self.verify.counts, scale * self.verify.seconds)
        draft, context = (Curve(one.counts, one.seconds) for one in (self.draft, self.context))
        return StepCosts(verify, draft, context, max_requests, attention)
