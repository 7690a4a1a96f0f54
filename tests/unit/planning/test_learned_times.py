"""How measured steps correct the profile, with numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.planner_world import ms_of, profiled_costs, straight_costs, timed
from vllm_dflash.planning.costs import (
    LARGEST_SURPRISE,
    LEARNING_RATE,
    LEAST_RATIO,
    Curve,
)


@pytest.mark.parametrize(
    ("measured", "ratios"),
    [
        # The first step counts in full, the second half, the third a third.
        ([(4, 1.2, 1)], [1.2] * 4),
        ([(4, 1.2, 1), (4, 1.0, 1)], [1.1] * 4),
        ([(4, 1.2, 1), (4, 1.0, 2)], [1.0667] * 4),
        # Once there were seven, each counts 15%.
        ([(4, 1.2, 70), (4, 1.0, 2)], [1 + 0.2 * (1 - LEARNING_RATE) ** 2] * 4),
        # What was not measured is as the nearest that was, of two the smaller.
        ([(2, 1.2, 1), (8, 1.1, 1)], [1.2, 1.2, 1.2, 1.1]),
        # 6 is nearer to 8 than to 4, 5 is not.
        ([(1, 1.2, 1), (6, 1.1, 1)], [1.2, 1.2, 1.1, 1.1]),
        ([(1, 1.2, 1), (5, 1.1, 1)], [1.2, 1.2, 1.1, 1.1]),
        # Interruptions make steps slow. One counts as three tenths, and not as a measurement.
        ([(4, 9.0, 1)], [1 + LARGEST_SURPRISE] * 4),
        ([(4, 9.0, 1), (4, 1.1, 1)], [1.1] * 4),
        ([(4, 1.0, 70), (4, 9.0, 1)], [1 + LEARNING_RATE * LARGEST_SURPRISE] * 4),
        # Nothing makes them more than twice as fast.
        ([(4, 0.0, 9)], [LEAST_RATIO] * 4),
    ],
)
def test_steps_are_as_much_slower_as_those_that_were_measured(
    measured: list[tuple[int, float, int]], ratios: list[float]
) -> None:
    costs = straight_costs()
    for count, ratio, num_steps in measured:
        for _ in range(num_steps):
            costs.record_step(timed(count, count, ratio * (10 + count)))
    found = [ms_of(costs, count, count) / (10 + count) for count in (1, 2, 4, 8)]
    assert found == pytest.approx(ratios, rel=1e-4)
    assert costs.plain(4) * 1000 == pytest.approx(14 * ratios[2], rel=1e-4)


def test_steps_with_drafts_are_as_plain_ones_until_they_are_measured() -> None:
    costs = straight_costs()
    costs.record_step(timed(4, 4, 1.2 * 14))
    assert ms_of(costs, 4, 10) == pytest.approx(1.2 * 20)
    costs.record_step(timed(4, 10, 22.0))
    assert ms_of(costs, 4, 10) == pytest.approx(22)
    assert ms_of(costs, 2, 8) == pytest.approx(1.1 * 18)
    assert ms_of(costs, 4, 30) == pytest.approx(1.1 * 40)
    assert costs.plain(4) * 1000 == pytest.approx(1.2 * 14)


def test_only_plain_steps_of_about_so_many_requests_are_known() -> None:
    costs = straight_costs()
    costs.record_step(timed(4, 9, 19.0))
    costs.record_step(timed(4, 4, 140.0))  # it was interrupted
    assert not costs.has_seen_plain(4)
    costs.record_step(timed(4, 4, 14.0))
    assert [costs.has_seen_plain(count) for count in (4, 5, 8)] == [True, True, False]


@pytest.mark.parametrize("times", [0, 5])
def test_what_verifying_takes_beside_is_not_charged_to_plain_decoding(times: int) -> None:
    """Neither if plain steps were measured nor if they never were."""
    costs = straight_costs()
    for _ in range(times):
        costs.record_step(timed(4, 4, 14.0))
    for _ in range(100):
        costs.record_step(timed(4, 10, 30.0))
    assert ms_of(costs, 4, 4) == pytest.approx(14)
    assert ms_of(costs, 4, 10) == pytest.approx(30, rel=0.01)


@pytest.mark.parametrize("num_requests", [1, 6, 32])
@pytest.mark.parametrize("scale", [0.6, 1.6])
def test_a_profile_that_is_too_fast_or_too_slow_is_found_out(
    num_requests: int, scale: float
) -> None:
    """Also for lengths that no step had."""
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
        assert ms_of(costs, num_requests, rows) == pytest.approx(expected, rel=0.01)


def test_drafting_and_storing_context_follow_their_own_measurements() -> None:
    costs, target = straight_costs(), straight_costs().target(1, np.array([1, 10]))

    def ms(waiting: int = 0) -> float:
        return 1000 * float(costs.blocks(1, 5, waiting=waiting))

    drafting, storing = (2 + 6) / 4, (4 + 1) / 20
    block: dict[str, Any] = {"draft_rows": 6, "draft_seconds": 1.25 * drafting / 1000}
    costs.record_step(timed(1, 1, 11.0, **block))
    assert ms() == pytest.approx(1.25 * drafting + storing)
    rows: dict[str, Any] = {"context_rows": 16, "context_seconds": 1.1 * (4 + 16) / 20_000}
    costs.record_step(timed(1, 1, 11.0, **rows))
    assert ms() == pytest.approx(1.25 * drafting + 1.1 * storing)
    assert costs.target(1, np.array([1, 10])) == pytest.approx(target)
