"""Costs of steps that are easy to compute by hand, or like those measured on two cores."""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_dflash.planning import Ints
from vllm_dflash.planning.costs import NO_ATTENTION, Attention, Curve, StepCosts
from vllm_dflash.planning.step import StepRecord

MOST_FREE = 16
VERIFY_MS = {
    1: 12.0,
    2: 12.8,
    4: 13.9,
    8: 16.9,
    16: 23.0,
    32: 38.0,
    64: 63.0,
    128: 120.0,
    256: 238.0,
}
DRAFT_MS = {2: 1.9, 8: 2.4, 32: 5.0, 64: 7.9, 256: 28.0}
CONTEXT_MS = {1: 0.3, 64: 1.3, 256: 4.7}


def curve(points: dict[int, float]) -> Curve:
    return Curve(np.array(list(points)), np.array(list(points.values())) / 1000)


def straight(fixed_ms: float, row_ms: float) -> Curve:
    """Return a curve of `fixed_ms` milliseconds, and `row_ms` more for each row."""
    return curve({0: fixed_ms, 1000: fixed_ms + 1000 * row_ms})


def straight_costs(attention: Attention = NO_ATTENTION) -> StepCosts:
    """Return costs that are easy to compute by hand: n rows take 10 + n ms to verify, (2 + n) / 4
    to draft, and (4 + n) / 20 to store."""
    return StepCosts(straight(10, 1), straight(0.5, 0.25), straight(0.2, 0.05), 64, attention)


def profiled_costs(max_requests: int = 64) -> StepCosts:
    return StepCosts(curve(VERIFY_MS), curve(DRAFT_MS), curve(CONTEXT_MS), max_requests)


def step_of(ids: list[str], verified: Ints, accepted: Ints) -> StepRecord:
    """Return a step that only decodes and verified `verified` drafts of each request, [R]."""
    rows = len(ids) + int(np.sum(verified))
    return StepRecord(ids, 1 + np.asarray(accepted), rows, np.asarray(verified))


def names(count: int, first: int = 0) -> list[str]:
    return [f"request-{number}" for number in range(first, first + count)]


def timed(num_requests: int, rows: int, ms: float, **more: Any) -> StepRecord:
    """Return a step that only decodes, with as many drafts as there are rows for."""
    ones, verified = np.ones(num_requests, dtype=int), np.zeros(num_requests, dtype=int)
    verified[0] = rows - num_requests
    return StepRecord(names(num_requests), ones, rows, verified, target_seconds=ms / 1000, **more)


def ms_of(costs: StepCosts, num_requests: int, rows: int) -> float:
    return 1000 * float(costs.target(num_requests, rows))


class SteadyCosts(StepCosts):
    """Costs that never change: decisions repeat."""

    def record_step(self, step: StepRecord, *, includes_block: bool = False) -> None: ...


def steady_costs(max_requests: int) -> SteadyCosts:
    """Return costs at which drafting pays, for some requests and to some length."""
    draft, context = {2: 1.0, 256: 3.0}, {1: 0.0, 64: 0.5}
    return SteadyCosts(curve(VERIFY_MS), curve(draft), curve(context), max_requests)
