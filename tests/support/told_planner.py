"""A planner that is told what drafts are worth and when to probe, and remembers what it asked."""

from __future__ import annotations

from typing import Any

import numpy as np

from support.planner_world import names, step_of, straight_costs
from vllm_dflash.planning import Floats
from vllm_dflash.planning.forecast import Forecast, Outcomes
from vllm_dflash.planning.planner import Planner
from vllm_dflash.planning.probing import ProbeSchedule
from vllm_dflash.planning.step import Step


class ToldForecast(Forecast):
    """Expects of drafting what a test says: by default, that each draft survives if all do."""

    def __init__(self, max_draft: int, mean_first_survival: float) -> None:
        super().__init__(max_draft)
        self.mean_first_survival = mean_first_survival
        self.told: Outcomes | None = None
        self.curve = np.zeros(max_draft)
        """How each drafted request's drafts survive, where `told` says nothing."""
        self.asked: list[list[float]] = []
        self.observed: list[tuple[Floats, Floats]] = []

    def observe(self, scores: Floats, curves: Floats) -> None:
        self.observed.append((scores.copy(), curves.copy()))

    def outcomes(self, scores: Floats) -> Outcomes:
        self.asked.append(scores.tolist())
        if self.told is not None:
            return self.told
        count, width = len(scores), len(self.curve)
        kept, gain = count * np.arange(1.0, width + 1), count * np.cumsum(self.curve)
        return Outcomes(np.array([count]), np.array([-np.inf]), kept[None, None], gain[None, None])


class ToldProbes(ProbeSchedule):
    """Probes when a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.due = False
        self.asked: list[tuple[float, float, bool]] = []
        self.restarts = 0

    def is_due(self, step_seconds: float, probe_seconds: float, *, is_close: bool) -> bool:
        self.asked.append((step_seconds, probe_seconds, is_close))
        return self.due

    def restart(self) -> None:
        self.restarts += 1


class ToldPlanner(Planner):
    """With costs to reckon with by hand."""

    forecast: ToldForecast
    probes: ToldProbes

    def __init__(
        self,
        max_draft: int,
        *curve: float,
        mean_first_survival: float = 0.5,
        max_requests: int = 8,
        **mode: Any,
    ) -> None:
        """Of every draft, position by position, so much is expected."""
        super().__init__(max_draft, max_requests, straight_costs(), **mode)
        self.forecast = ToldForecast(max_draft, mean_first_survival)
        self.forecast.curve[: len(curve)] = curve
        self.probes = ToldProbes()


def decoding(
    limits: list[int], waiting: list[int] | None = None, ids: list[str] | None = None
) -> Step:
    """An undrafted step of requests that can use so many drafts."""
    nothing = np.zeros(len(limits), dtype=int)
    step = step_of(ids or names(len(limits)), nothing, nothing)
    step.limits = np.array(limits)
    step.waiting = np.array(waiting or nothing)
    return step
