"""The cost model: interpolation, and learning from measured steps."""

import numpy as np
import pytest

from support.levels import estimate_of
from support.planner_world import curve, profiled_costs
from vllm_dflash.planning.step import StepRecord


def timed(num_requests: int, rows: int, seconds: float, draft_seconds: float = 0.0) -> StepRecord:
    """A step of so many rows, which drafted as many if `draft_seconds` is given."""
    ids = [str(number) for number in range(num_requests)]
    step = StepRecord(ids, np.ones(num_requests, dtype=int), rows, target_seconds=seconds)
    step.draft_seconds, step.draft_rows = draft_seconds, rows * (draft_seconds > 0)
    return step


def test_a_curve_interpolates_and_goes_on_with_its_last_slope() -> None:
    line = curve({1: 10.0, 3: 20.0, 5: 40.0})
    assert line.at(np.array([1, 2, 3, 4, 7])) * 1000 == pytest.approx([10, 15, 20, 30, 60])


def test_a_profile_that_dips_is_made_non_decreasing() -> None:
    assert curve({1: 10.0, 2: 9.0, 4: 12.0}).at(np.array([1, 2, 4])) * 1000 == pytest.approx(
        [10, 10, 12]
    )


@pytest.mark.parametrize("num_requests", [1, 6, 32])
def test_step_costs_find_what_the_profile_did_not_see(num_requests: int) -> None:
    """Plain steps are 20% slower than profiled, verifying costs 2 ms more, drafting double."""
    costs, truth = profiled_costs(), profiled_costs()
    drafted = num_requests * 3
    plain = 1.2 * float(truth.verify.at(num_requests))
    verify = 1.2 * float(truth.verify.at(drafted)) + 0.002
    draft = 2 * float(truth.draft.at(drafted))
    for _ in range(150):
        costs.observe(timed(num_requests, num_requests, plain))
        costs.observe(timed(num_requests, drafted, verify, draft))
    estimate = estimate_of(costs, timed(num_requests, drafted, verify, draft))
    assert estimate.target_seconds == pytest.approx(verify, rel=0.02)
    assert estimate.draft_seconds == pytest.approx(draft, rel=0.02)
    assert estimate.plain_seconds == pytest.approx(plain, rel=0.02)


@pytest.mark.parametrize("num_requests", [1, 6, 32])
def test_drafts_make_no_step_faster(num_requests: int) -> None:
    """Steps without drafts were measured on a machine that was busy then. Now that drafting seems
    to pay, only steps with drafts are: they tell that the others would not take that long."""
    costs, rows = profiled_costs(), num_requests + 3
    usual = float(costs.verify.at(num_requests)), float(costs.verify.at(rows))
    for _ in range(20):
        costs.observe(timed(num_requests, num_requests, usual[0]))
        costs.observe(timed(num_requests, rows, usual[1]))
    for _ in range(20):
        costs.observe(timed(num_requests, num_requests, 1.5 * usual[0]))
    busy = estimate_of(costs, timed(num_requests, rows, usual[1]))
    assert busy.plain_seconds > 1.3 * usual[0]
    for _ in range(25):
        costs.observe(timed(num_requests, rows, usual[1]))
    found = estimate_of(costs, timed(num_requests, rows, usual[1]))
    assert found.plain_seconds < 1.06 * usual[1]
    assert found.target_seconds == pytest.approx(usual[1], rel=0.03)
    # What verifying itself takes is no reason to think less of it.
    slower = usual[1] + 0.004
    for _ in range(40):
        costs.observe(timed(num_requests, num_requests, usual[0]))
        costs.observe(timed(num_requests, rows, slower))
    found = estimate_of(costs, timed(num_requests, rows, slower))
    assert found.plain_seconds == pytest.approx(usual[0], rel=0.03)
    assert found.target_seconds == pytest.approx(slower, rel=0.03)


@pytest.mark.parametrize("num_requests", [1, 6, 32])
def test_a_profile_that_is_too_steep_says_nothing_about_plain_steps(num_requests: int) -> None:
    """Steps with drafts take less than profiled, and still more than steps without."""
    costs, rows = profiled_costs(), 4 * num_requests
    plain = float(costs.verify.at(num_requests))
    verify = 0.5 * (plain + float(costs.verify.at(rows)))
    for number in range(100):
        if number < 10:
            costs.observe(timed(num_requests, num_requests, plain))
        costs.observe(timed(num_requests, rows, verify))
        found = estimate_of(costs, timed(num_requests, rows, verify))
        assert found.plain_seconds == pytest.approx(plain, rel=0.06)
    assert found.target_seconds == pytest.approx(verify, rel=0.02)
