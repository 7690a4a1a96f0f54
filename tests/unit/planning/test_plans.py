"""Which requests are drafted, and how wide, with numbers worked out by hand."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest

from support.planner_world import names, step_of, straight
from support.told_planner import ToldPlanner, v2
from vllm_dflash.planning.costs import StepCosts
from vllm_dflash.planning.planner import Planner
from vllm_dflash.planning.probes import PROBE_SHARE
from vllm_dflash.planning.step import Predicted

ALIKE: dict[str, Any] = {"ragged_seconds": 1.0}


def test_drafts_to_the_full_until_costs_are_known() -> None:
    planner = Planner(3, 8)
    plan = planner.plan(names(2), np.array([10, 10]), np.array([3, 1]))
    assert (plan.lengths.tolist(), plan.runs_block, plan.drafted.all()) == ([3, 1], True, True)
    planner.record_step(step_of(names(2), np.array([3, 1]), np.array([1, 1])))  # teaches nothing


@pytest.mark.parametrize("of", ["V1", "V2"])
@pytest.mark.parametrize(("gain", "drafts"), [(0.22, True), (0.21, False)])
def test_drafting_must_promise_one_percent_more(gain: float, drafts: bool, of: str) -> None:
    """1.25 ms for the block and its context, 12 to verify; plain decoding is one token in 11 ms:
    1.0128 times as fast, and 1.0045."""
    ours = ToldPlanner(gain, v2=v2() if of == "V2" else None)
    plan = ours.plans([1])
    assert bool(plan.width) == plan.drafted.any() == drafts
    assert plan.lengths.tolist() == [drafts]
    assert plan.utility_per_second == pytest.approx(1000 / (13.25 if drafts else 11))


@pytest.mark.parametrize("of", ["V1", "V2"])
def test_nobody_who_could_be_drafted(of: str) -> None:
    ours = ToldPlanner(0.9, 0.9, v2=v2() if of == "V2" else None)
    ours.probes.due = True
    plan = ours.plans([0, 0, 0])
    assert plan.drafted.tolist() == [False] * 3
    assert (plan.width, plan.is_probe, plan.lengths.tolist()) == (0, False, [0, 0, 0])
    assert ours.probes.asked == []
    assert ours.plan([], np.zeros(0, np.int64), np.zeros(0, np.int64)).width == 0
    assert ours.plans([0, 1]).drafted.tolist() == [of == "V2", True]


def test_what_was_never_measured_is_tried_with_few() -> None:
    """A promise of what no request has shown yet. Each that has shown it lets two more be tried."""
    cheap = StepCosts(straight(10, 0.02), straight(0.1, 0.005), straight(0.02, 0.001), 64)
    ours, limits = ToldPlanner(0.9, 0.8, costs=cheap), [2] * 40
    assert ours.plans(limits).drafted.sum() == 1 + 40 // PROBE_SHARE
    rows = ours.rows(names(40))
    ours.blocks.num_observed[rows[:5]] = 1
    assert ours.plans(limits).drafted.sum() == 1 + 40 // PROBE_SHARE + 2 * 5
    ours.blocks.num_observed[rows] = 1
    assert ours.plans(limits).drafted.sum() == 40


def test_who_promises_little_is_left_out() -> None:
    ours = ToldPlanner(0.9, 0.8)
    rows = ours.rows(names(3))
    ours.blocks.num_observed[rows] = 1
    ours.blocks.curves[rows[1]] = 0.1, 0.0
    assert ours.plans([2, 2, 2]).drafted.tolist() == [True, False, True]


def state_of(thing: Any) -> Any:
    """Return all values in something, and in what it holds."""
    if hasattr(thing, "__dict__"):
        return {name: state_of(value) for name, value in vars(thing).items()}
    return deepcopy(thing)


def learned_of(planner: Planner) -> dict[str, Any]:
    """Return all that a planner has learned."""
    return {name: state_of(getattr(planner, name)) for name in ("blocks", "texts", "costs")}


@pytest.mark.parametrize("due", [False, True])
@pytest.mark.parametrize("of", ["V1", "V2"])
def test_planning_learns_nothing(of: str, due: bool) -> None:
    """Whoever is asked twice gives the same answer, and a plan that comes true proves nothing."""
    ours = ToldPlanner(0.9, 0.8, v2=v2() if of == "V2" else None, most_free=6)
    ours.plans([2, 2, 2])  # rows for the requests
    step = step_of(names(3), np.array([2, 0, 1]), np.array([1, 0, 1]))
    step.context_lens, step.target_seconds = np.full(3, 10), 0.015
    ours.record_step(step)
    one = np.ones(1, np.int64)
    ours.blocks.record_outcomes(0 * one, np.full((1, 2), 0.7), one, one)
    ours.probes.due = ours.checks.due = due
    three = np.full(3, 3)
    before = learned_of(ours)
    assert {"verify", "draft", "context", "attention"} < before["costs"].keys()
    for _ in range(3):
        ours.plans([2, 0, 2], predicted=Predicted(three, three, *(0 * three,) * 3))
    np.testing.assert_equal(learned_of(ours), before)
