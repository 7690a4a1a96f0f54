"""The cost model, and how measurements move it, with numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.planner_world import ms_of, profiled_costs, straight_costs, timed
from vllm_dflash.planning.costs import (
    LARGEST_SURPRISE,
)


@pytest.mark.parametrize(
    ("measured", "ms"),
    [
        # The first step counts in full, and is all that is known.
        ([(4, 3.0, 1)], [3, 3, 3, 3]),
        # The second step counts half, the third a third.
        ([(4, 3.0, 1), (4, 1.0, 1)], [2, 2, 2, 2]),
        ([(4, 3.0, 1), (4, 1.0, 1), (4, -1.0, 1)], [1, 1, 1, 1]),
        # From the seventh step on, each counts 15%.
        ([(4, 3.0, 7), (4, 2.0, 1)], [2.85] * 4),
        ([(4, 3.0, 70), (4, 2.0, 2)], [2 + 0.85**2] * 4),
        # What was not measured follows the nearest one that was, of two the smaller.
        ([(2, 2.0, 1), (8, 1.0, 1)], [2, 2, 2, 1]),
        ([(1, 3.0, 1), (8, 1.0, 1), (8, 0.0, 1)], [3, 3, 0.5, 0.5]),
        # 6 is nearer to 8 than to 4, 5 is not.
        ([(2, 2.0, 1), (6, 1.0, 1)], [2, 2, 2, 1]),
        ([(2, 2.0, 1), (5, 1.0, 1)], [2, 2, 1, 1]),
    ],
)
def test_a_level_is_what_steps_of_so_many_requests_took_longer(
    measured: list[tuple[int, float, int]], ms: list[float]
) -> None:
    costs = straight_costs()
    for count, surprise, num_steps in measured:
        for _ in range(num_steps):
            costs.record_step(timed(count, count, 10 + count + surprise))
    counts = [2**octave for octave in range(len(ms))]
    found = [ms_of(costs, count, count) - 10 - count for count in counts]
    assert found == pytest.approx(ms, abs=1e-6)
    assert costs.plain(4) * 1000 == pytest.approx(14 + ms[2])


def test_only_what_was_measured_is_known() -> None:
    costs = straight_costs()
    assert not costs.has_seen_plain(4)
    costs.record_step(timed(4, 9, 19.0))
    assert not costs.has_seen_plain(4)
    costs.record_step(timed(4, 4, 14.0))
    assert costs.has_seen_plain(4)
    assert costs.has_seen_plain(5)
    assert not costs.has_seen_plain(8)


def test_no_step_takes_less_than_half_its_forward_pass() -> None:
    costs = straight_costs()
    for _ in range(20):
        costs.record_step(timed(1, 1, 0.0))
    assert costs.target(1, np.array([1, 2, 10])) * 1000 == pytest.approx([5.5, 6.5, 14.5])
    costs.attention = costs.attention._replace(draft=1.0)
    assert ms_of(costs, 1, 10) >= 10.0


@pytest.mark.parametrize(("ms", "expected"), [(1000.0, 1.3 * 14), (0.0, 7.0)])
def test_no_step_is_longer_by_more_than_three_tenths_but_shorter_by_half(
    ms: float, expected: float
) -> None:
    """Interruptions make steps slow; nothing makes them faster than half their forward pass."""
    costs = straight_costs()
    costs.record_step(timed(4, 4, ms))
    assert costs.plain(4) * 1000 == pytest.approx(expected)


def test_the_first_undrafted_step_tells_what_drafted_ones_take_beside() -> None:
    """Drafted steps took 3 ms longer than profiled, of which plain ones take 2: so drafts 1."""
    costs = straight_costs()
    for _ in range(100):
        costs.record_step(timed(4, 10, 23.0))
    drafted = ms_of(costs, 4, 10)
    assert drafted == pytest.approx(23, rel=0.01)
    costs.record_step(timed(4, 4, 16.0))
    assert costs.plain(4) * 1000 == pytest.approx(16)
    assert ms_of(costs, 4, 10) == pytest.approx(drafted, rel=0.01)


def test_other_batch_sizes_start_from_what_the_nearest_took() -> None:
    """A machine that is slower than profiled is so with every batch, and drafts are as well."""
    costs = straight_costs()
    for _ in range(200):
        costs.record_step(timed(4, 4, 16.0))
        costs.record_step(timed(4, 10, 16.0 + 2 * 6))
        costs.record_step(timed(4, 20, 16.0 + 2 * 16))
    for count in (1, 16, 64):
        assert costs.plain(count) * 1000 == pytest.approx(12 + count, rel=0.01)
        assert ms_of(costs, count, count + 10) == pytest.approx(12 + count + 20, rel=0.02)
    costs.record_step(timed(16, 16, 26.0))
    assert costs.plain(16) * 1000 == pytest.approx(26), "until they are measured themselves"
    assert costs.plain(4) * 1000 == pytest.approx(16)


def test_draft_and_context_follow_their_measurements() -> None:
    costs, truth = straight_costs(), straight_costs()
    costs.record_step(timed(1, 1, 11.0, draft_rows=6, draft_seconds=0.0025))
    truth.draft.correct(6, 0.0025)
    assert costs.draft.seconds == pytest.approx(truth.draft.seconds)
    assert costs.context.seconds == pytest.approx(truth.context.seconds)
    costs.record_step(timed(1, 1, 11.0, context_rows=16, context_seconds=0.0008))
    truth.context.correct(16, 0.0008)
    assert costs.context.seconds == pytest.approx(truth.context.seconds)
    assert costs.draft.seconds == pytest.approx(truth.draft.seconds)
    costs.record_step(timed(4, 10, 19.0))
    assert costs.draft.seconds == pytest.approx(truth.draft.seconds)
    assert costs.verify.seconds.tolist() == straight_costs().verify.seconds.tolist()


@pytest.mark.parametrize("num_requests", [1, 6, 32])
def test_step_costs_find_what_the_profile_did_not_see(num_requests: int) -> None:
    """Plain steps are 20% slower than profiled, verifying costs 2 ms more, drafting double."""
    costs, truth = profiled_costs(), profiled_costs()
    drafted = num_requests * 3
    plain = 1.2 * float(truth.verify.at(num_requests))
    verify = 1.2 * float(truth.verify.at(drafted)) + 0.002
    draft = 2 * float(truth.draft.at(drafted))
    block: dict[str, Any] = {"draft_rows": drafted, "draft_seconds": draft}
    for _ in range(150):
        costs.record_step(timed(num_requests, num_requests, 1000 * plain))
        costs.record_step(timed(num_requests, drafted, 1000 * verify, **block))
    assert ms_of(costs, num_requests, drafted) == pytest.approx(1000 * verify, rel=0.02)
    assert costs.draft.at(drafted) == pytest.approx(draft, rel=0.02)
    assert costs.plain(num_requests) == pytest.approx(plain, rel=0.02)


@pytest.mark.parametrize("num_requests", [1, 6, 32])
def test_drafts_make_no_step_faster(num_requests: int) -> None:
    """Steps without drafts were measured on a machine that was busy then. Now that drafting seems
    to pay, only steps with drafts are: they tell that the others would not take that long."""
    costs, rows = profiled_costs(), num_requests + 3
    usual = float(costs.verify.at(num_requests)), float(costs.verify.at(rows))
    for _ in range(20):
        costs.record_step(timed(num_requests, num_requests, 1000 * usual[0]))
        costs.record_step(timed(num_requests, rows, 1000 * usual[1]))
    for _ in range(20):
        costs.record_step(timed(num_requests, num_requests, 1500 * usual[0]))
    assert costs.plain(num_requests) > 1.3 * usual[0]
    for _ in range(25):
        costs.record_step(timed(num_requests, rows, 1000 * usual[1]))
    assert costs.plain(num_requests) < 1.06 * usual[1]
    assert ms_of(costs, num_requests, rows) == pytest.approx(1000 * usual[1], rel=0.04)
    # What verifying itself takes is no reason to think less of it.
    slower = usual[1] + 0.004
    for _ in range(120):
        costs.record_step(timed(num_requests, num_requests, 1000 * usual[0]))
        costs.record_step(timed(num_requests, rows, 1000 * slower))
    assert costs.plain(num_requests) == pytest.approx(usual[0], rel=0.03)
    assert ms_of(costs, num_requests, rows) == pytest.approx(1000 * slower, rel=0.03)


@pytest.mark.parametrize("num_requests", [1, 6, 32])
def test_a_profile_that_is_too_steep_says_nothing_about_plain_steps(num_requests: int) -> None:
    """Steps with drafts take less than profiled, and still more than steps without."""
    costs, rows = profiled_costs(), 4 * num_requests
    plain = float(costs.verify.at(num_requests))
    verify = 0.5 * (plain + float(costs.verify.at(rows)))
    for number in range(100):
        if number < 10:
            costs.record_step(timed(num_requests, num_requests, 1000 * plain))
        costs.record_step(timed(num_requests, rows, 1000 * verify))
        assert costs.plain(num_requests) == pytest.approx(plain, rel=0.06)
    assert ms_of(costs, num_requests, rows) == pytest.approx(1000 * verify, rel=0.02)


def test_a_step_that_was_interrupted_says_little() -> None:
    """It counts as one that took three tenths longer than expected."""
    costs = straight_costs()
    for _ in range(20):
        costs.record_step(timed(4, 10, 20.0))
    costs.record_step(timed(4, 10, 20_000.0))
    assert ms_of(costs, 4, 10) < 20 * (1 + LARGEST_SURPRISE / 10)
