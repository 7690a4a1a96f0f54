"""What drafts add to a step: a line over what the profile expects, learned from the last steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from support.planner_world import ms_of, profiled_costs, straight_costs, timed
from vllm_dflash.planning.costs import LINE_MEMORY, MOST_SLOPE, PRIOR_STEPS, Curve


def line_by_lstsq(x: list[float], y: list[float]) -> tuple[float, float]:
    """Intercept and slope of weighted points, and of a prior of `PRIOR_STEPS` steps: an intercept
    of 0, and a slope of 1, which counts like steps with as many drafts as were seen."""
    weights = LINE_MEMORY ** np.arange(len(x))[::-1]
    prior = PRIOR_STEPS * (weights @ np.square(x)) / weights.sum()
    rows = [np.sqrt(weights)[:, None] * np.column_stack([np.ones(len(x)), x])]
    rows.append(np.diag(np.sqrt([PRIOR_STEPS, prior])))
    values = np.concatenate([np.sqrt(weights) * y, [0.0, np.sqrt(prior)]])
    intercept, slope = np.linalg.lstsq(np.concatenate(rows), values, rcond=None)[0]
    if not 1 / MOST_SLOPE <= slope <= MOST_SLOPE:
        slope = min(max(slope, 1 / MOST_SLOPE), MOST_SLOPE)
        intercept = weights @ (np.array(y) - slope * np.array(x)) / (weights.sum() + PRIOR_STEPS)
    return float(intercept), float(slope)


@given(
    st.lists(
        st.tuples(st.integers(1, 12), st.floats(0.3, 1.6), st.floats(0, 3)),
        min_size=1,
        max_size=12,
    )
)
def test_what_drafts_add_is_a_line_of_least_squares(
    steps: list[tuple[int, float, float]],
) -> None:
    """Over the last steps' drafts, against numpy's."""
    costs, x, y = straight_costs(), list[float](), list[float]()
    for drafts, slope, intercept in steps:
        ms = 14 + slope * drafts + intercept
        limit = 1.3 * ms_of(costs, 4, 4 + drafts)
        costs.record_step(timed(4, 4 + drafts, ms))
        x.append(drafts)
        y.append(min(ms, limit) - 14)
        assume(costs.plain(4) * 1000 == pytest.approx(14))  # drafts made no step faster
    intercept, slope = line_by_lstsq(x, y)
    for drafts in (1, 5, 12, 30):
        expected = 14 + max(intercept + slope * drafts, 0.0)
        assert ms_of(costs, 4, 4 + drafts) == pytest.approx(max(expected, (14 + drafts) / 2))


@pytest.mark.parametrize("num_requests", [1, 6, 32])
@pytest.mark.parametrize("scale", [0.6, 1.6])
def test_a_profile_whose_rows_are_too_cheap_or_too_dear_is_found_out(
    num_requests: int, scale: float
) -> None:
    """Also, if less exactly, for lengths that no step had: it is wrong in all of them alike."""
    truth, costs = profiled_costs(), profiled_costs()
    costs.verify = Curve(truth.verify.counts, scale * truth.verify.seconds)
    rng = np.random.default_rng(0)
    for number in range(150):
        rows = num_requests * (1 + [0, 2, 5][number % 3])
        ms = 1000 * float(truth.verify.at(rows)) * (1 + 0.01 * rng.normal())
        costs.record_step(timed(num_requests, rows, ms))
    for length in range(8):
        rows = num_requests * (1 + length)
        expected = 1000 * float(truth.verify.at(rows))
        tolerance = 0.04 if length in (0, 2, 5) else 0.08
        assert ms_of(costs, num_requests, rows) == pytest.approx(expected, rel=tolerance)


def test_an_extreme_slope_is_limited() -> None:
    costs = straight_costs()
    for number in range(300):
        drafts = 1 + number % 8
        costs.record_step(timed(1, 1 + drafts, 11 + 100 * drafts))
    added = np.diff(costs.target(1, np.array([2, 4, 8]))) * 1000
    assert added == pytest.approx([2 * MOST_SLOPE, 4 * MOST_SLOPE])


@pytest.mark.parametrize("hidden_ms", [3.0, 30.0])
@pytest.mark.parametrize("num_requests", [1, 6, 32])
def test_what_verifying_takes_beside_is_not_charged_to_plain_decoding(
    num_requests: int, hidden_ms: float
) -> None:
    """Neither if plain steps were measured nor if they never were."""
    truth, rows = profiled_costs(), 4 * num_requests
    plain, drafted = (1000 * float(truth.verify.at(each)) for each in (num_requests, rows))
    for times in (0, 5):
        costs = profiled_costs()
        for _ in range(times):
            costs.record_step(timed(num_requests, num_requests, plain))
        for _ in range(100):
            costs.record_step(timed(num_requests, rows, drafted + hidden_ms))
        assert ms_of(costs, num_requests, num_requests) == pytest.approx(plain)
        assert ms_of(costs, num_requests, rows) == pytest.approx(drafted + hidden_ms, rel=0.03)
