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
