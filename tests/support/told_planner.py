"""A planner that is told what drafts are worth and when to probe, and remembers what it asked."""

from __future__ import annotations

from typing import Any

import numpy as np

from support.planner_world import names, step_of, straight_costs
from vllm_dflash.planning import Floats, Ints
from vllm_dflash.planning.forecast import Forecast, Summary
from vllm_dflash.planning.planner import Planner
from vllm_dflash.planning.probes import ProbeSchedule
from vllm_dflash.planning.step import StepRecord
from vllm_dflash.planning.thresholds import THRESHOLDS

EVERYBODY = np.array([-np.inf])
"""The least score of the only group."""


class ToldForecast(Forecast):
    """Expects of drafting what a test says, with all drafts kept at every threshold. Remembers the
    scores by which requests were told apart."""

    def __init__(self, curve: Floats, mean_first_worth: float, num_rows: int) -> None:
        kept, gain = np.arange(1.0, len(curve) + 1), np.cumsum(curve)
        kept, gain = (np.tile(one, (1, len(THRESHOLDS), 1)) for one in (kept, gain))
        self.summary = Summary(EVERYBODY, kept, gain, mean_first_worth, num_samples=1)
        self.asked: list[list[float]] = []
        self.observed: list[tuple[Floats, Floats]] = []
        super().__init__(len(curve), num_rows)

    def scores(self, rows: Ints) -> Floats:
        found = super().scores(rows)
        self.asked.append(found.tolist())
        return found

    def observe(self, rows: Ints, curves: Floats, samples: Floats | None = None) -> None:
        self.observed.append((self._scores[rows].copy(), curves.copy()))
        super().observe(rows, curves, samples)

    def _summarise(self) -> None:
        self._unread = 0


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
    """A planner with costs that are easy to compute by hand."""

    forecast: ToldForecast
    probes: ToldProbes

    def __init__(
        self,
        max_draft: int,
        *curve: float,
        mean_first_worth: float = 0.5,
        max_requests: int = 8,
        **mode: Any,
    ) -> None:
        """Set what is expected of every draft, position by position."""
        super().__init__(max_draft, max_requests, straight_costs(), **mode)
        of_all = np.pad(np.array(curve), (0, max_draft - len(curve)))
        self.forecast = ToldForecast(of_all, mean_first_worth, 2 * max_requests)
        self.probes = ToldProbes()


def decoding(
    limits: list[int], waiting: list[int] | None = None, ids: list[str] | None = None
) -> StepRecord:
    """Return an undrafted step of requests that can use `limits` drafts."""
    nothing = np.zeros(len(limits), dtype=int)
    step = step_of(ids or names(len(limits)), nothing, nothing)
    step.limits = np.array(limits)
    step.waiting = np.array(waiting or nothing)
    return step
