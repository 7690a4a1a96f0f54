"""A planner that is told what drafts are worth and when to probe, and remembers what it asked."""

from __future__ import annotations

from typing import Any

import numpy as np

from support.planner_world import names, straight_costs
from vllm_dflash.planning.planner import Planner
from vllm_dflash.planning.probes import Probes
from vllm_dflash.planning.step import Plan


class Told(Probes):
    """Probes when a test says so, and remembers what it asked."""

    def __init__(self) -> None:
        super().__init__()
        self.due = False
        self.asked: list[tuple[float, float, bool]] = []
        self.promises: list[float] = []
        self.restarts = 0

    def are_due(
        self, passed: float, lost: float, *, is_new: bool = False, promise: float = 1.0
    ) -> bool:
        self.asked.append((passed, lost, is_new))
        self.promises.append(promise)
        return self.due

    def restart(self) -> None:
        self.restarts += 1


class ToldPlanner(Planner):
    """A planner that is told what all drafts are worth, and when to go against the plan."""

    probes: Told
    checks: Told
    beside: Told

    def __init__(self, *curve: float, v2: dict[str, Any] | None = None, **more: Any) -> None:
        costs = more.pop("costs", None) or straight_costs()
        super().__init__(len(curve), 64, None if v2 is not None else costs, **more)
        if v2 is not None:
            self.start(costs, v2.pop("choices", range(len(curve) + 1)), **v2)
        self.blocks.curves[:] = self.blocks.typical[:] = curve
        self.probes, self.checks, self.beside = Told(), Told(), Told()

    def plans(self, limits: list[int], context: list[int] | None = None, **more: Any) -> Plan:
        lens = np.array(context or [10] * len(limits))
        return self.plan(names(len(limits)), lens, np.array(limits), **more)


def v2(*choices: int, **rules: Any) -> dict[str, Any]:
    return {"choices": choices or range(8), **rules}
