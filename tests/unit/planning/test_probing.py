"""When a step goes against the plan, for whom, and at what cost."""

from __future__ import annotations

from itertools import count as numbers
from typing import Any

import numpy as np
import pytest

from support.planner_world import names, step_of, straight, straight_costs
from support.told_planner import ToldPlanner, v2
from vllm_dflash.planning.costs import Attention, StepCosts
from vllm_dflash.planning.planner import LEAST_LOST, Planner
from vllm_dflash.planning.probes import (
    FIRST_SHARE,
    LEAST_SHARE,
    PROBE_SHARE,
    Probes,
)

USELESS = (0.01, 0.0, 0.0, 0.0)


def test_a_probe_waits_until_its_share_of_the_time_is_saved() -> None:
    """And not a step longer. The share halves with every probe, down to that of the long run."""
    probes, passed = Probes(), 0.001 / FIRST_SHARE
    assert [probes.are_due(passed, 0.00399) for _ in range(4)] == [False, False, False, True]
    assert (probes.saved, probes.share) == (0.0, FIRST_SHARE / 2)
    for _ in range(9):
        assert probes.are_due(1000.0, 0.001)
    assert probes.share == LEAST_SHARE
    probes.restart()
    assert probes.share == FIRST_SHARE


@pytest.mark.parametrize(
    ("share", "asked", "saved"),
    [
        (FIRST_SHARE, {}, FIRST_SHARE),
        (FIRST_SHARE, {"promise": 3.0}, FIRST_SHARE),
        (FIRST_SHARE, {"promise": 0.2}, 0.2 * FIRST_SHARE),
        (FIRST_SHARE, {"promise": 0.0}, LEAST_SHARE),
        (LEAST_SHARE, {}, LEAST_SHARE),
        (LEAST_SHARE, {"is_new": True}, FIRST_SHARE),
        (LEAST_SHARE, {"is_new": True, "promise": 0.2}, 0.2 * FIRST_SHARE),
    ],
)
def test_what_a_second_saves_for_a_probe(share: float, asked: dict[str, Any], saved: float) -> None:
    """More for what was never measured, less for what can win little, never less than in the long
    run."""
    probes = Probes(share=share)
    assert not probes.are_due(1.0, 1.0, **asked)
    assert (probes.saved, probes.share) == (pytest.approx(saved), share)


@pytest.mark.parametrize("of", ["V1", "V2"])
def test_a_probe_promises_what_perfect_drafts_would_win(of: str) -> None:
    """One request: 5 tokens in 16.75 ms instead of one in 11. Where rows are dear, nothing."""
    ours = ToldPlanner(*USELESS, v2=v2() if of == "V2" else None)
    ours.plans([4])
    assert ours.probes.promises == pytest.approx([5 / (15 + 1.75 + 0.25) * 11 - 1])
    rows = StepCosts(straight(0, 10), straight(0.5, 0.25), straight(0.2, 0.05), 64)
    ours.costs = rows
    ours.plans([4] * 8)
    assert ours.probes.promises[-1] == 0.0


def verified(ours: Planner, request: int) -> None:
    """Have a request's drafts verified in a step of its own, unsuccessfully."""
    rows = ours.rows(names(8))[[request]]
    ours.blocks.step += 1
    ours.blocks.record_drafts(rows, np.full((1, 4), 0.01))
    one = np.ones(1, np.int64)
    ours.blocks.record_outcomes(rows, np.full((1, 4), 0.01), one, 0 * one)


@pytest.mark.parametrize("of", ["V1", "V2"])
def test_who_was_never_measured_is_probed_first_then_who_was_longest_ago(of: str) -> None:
    ours = ToldPlanner(*USELESS, v2=v2() if of == "V2" else None)
    ours.probes.due = True
    for request in (7, 1, 4, 0, 6, 3):
        verified(ours, request)
    probed = []
    for _ in range(9):
        plan = ours.plans([4] * 8)
        assert plan.is_probe
        chosen = np.flatnonzero(plan.drafted if of == "V1" else plan.lengths)
        assert len(chosen) == 1
        probed += chosen.tolist()
        verified(ours, probed[-1])
    assert probed == [2, 5, 7, 1, 4, 0, 6, 3, 2]


def test_who_is_drafted_anyway_is_not_probed() -> None:
    """The second one pays, so the others are probed beside it."""
    ours = ToldPlanner(*USELESS)
    rows = ours.rows(names(3))
    ours.blocks.curves[rows[1]] = 0.95, 0.9, 0.85, 0.8
    ours.blocks.num_observed[rows] = 1
    assert ours.plans([4] * 3).drafted.tolist() == [False, True, False]
    ours.probes.due = True
    plan = ours.plans([4] * 3)
    assert plan.drafted.tolist() == [True, True, False]
    assert plan.rate > 1000 * 3 / 13
    assert ours.probes.restarts == 0
    # With nobody left out there is nothing to find out, until someone is.
    ours.blocks.curves[rows] = 0.95, 0.9, 0.85, 0.8
    assert not ours.plans([4] * 3).is_probe
    assert ours.probes.restarts == 1
    # In prompts and at their ends nobody can be drafted, which changes nothing.
    assert not ours.plans([0] * 3).is_probe
    assert ours.probes.restarts == 1


@pytest.mark.parametrize(("count", "chosen"), [(1, 1), (15, 1), (16, 2), (33, 3), (64, 5)], ids=str)
def test_a_probe_takes_one_request_and_one_more_for_sixteen(count: int, chosen: int) -> None:
    assert PROBE_SHARE == 16
    ours = ToldPlanner(*USELESS)
    ours.probes.due = True
    plan = ours.plans([4] * count)
    assert np.flatnonzero(plan.drafted).tolist() == list(range(chosen))
    assert (plan.width, plan.is_probe) == (4, True)
    # Only those who can use drafts.
    assert np.flatnonzero(ours.plans([0] * (count - 1) + [4]).drafted).tolist() == [count - 1]


def test_a_probe_costs_what_its_own_requests_take() -> None:
    """Four requests. One is at its limit; of the others only the third was never measured."""
    ours = ToldPlanner(*USELESS, costs=straight_costs(Attention(draft=1e-6, block=2e-6)))
    rows = ours.rows(names(4))
    ours.blocks.last_step[rows[[0, 1, 3]]] = 1
    lens, waiting = [100, 50_000, 2_000, 300], np.array([9, 1, 64, 700])
    ours.plans([4, 0, 4, 4], lens, waiting=waiting, steps=5)
    ((passed, lost, is_new),) = ours.probes.asked
    # 5 rows to draft, 3 more to verify, its row and a waiting one a step to store; and its context
    # is read for them.
    assert lost == pytest.approx((1.75 + 4 + 3 + 3 * 2 + 0.3) / 1000)
    assert passed == pytest.approx(5 * 0.014)
    assert is_new
    ours.probes.due = True
    assert ours.plans([4, 0, 4, 4], lens).drafted.tolist() == [False, False, True, False]
    ours.blocks.num_observed[rows] = 1
    ours.plans([4, 0, 4, 4], lens)
    assert not ours.probes.asked[-1][2]


@pytest.mark.parametrize(
    ("rules", "choices", "count", "lengths"),
    [
        ({}, (1, 2, 3, 4), 8, [3] + [0] * 7),
        ({"ragged_seconds": 1.0}, (1, 4), 8, [4] * 8),
        ({"ragged_seconds": 1.0}, (7,), 1, [4]),
    ],
)
def test_on_v2_a_probe_drafts_all_and_verifies_some(
    rules: dict[str, Any], choices: tuple[int, ...], count: int, lengths: list[int]
) -> None:
    """Where one length for all is worth more than individual ones, all have it verified."""
    planner = ToldPlanner(*USELESS, v2=v2(*choices, **rules))
    planner.costs.context = straight(0, 0)
    assert not planner.plans([4] * count).runs_block
    ((passed, lost, _),) = planner.probes.asked
    assert passed == pytest.approx((10 + count) / 1000)
    # 5 rows of each to draft, and one to store, which takes no time of its own there.
    assert lost == pytest.approx((sum(lengths) + (2 + 5 * count) / 4) / 1000)
    planner.probes.due = True
    plan = planner.plans([4] * count)
    assert (plan.runs_block, plan.drafted.all(), plan.lengths.tolist()) == (True, True, lengths)
    assert plan.is_probe
    assert planner.plans([1] * count).lengths.max() == 1


def test_on_v2_who_has_no_drafts_verified_is_probed_beside_the_others() -> None:
    """All have a block, but only the first and the third have drafts that are worth their rows. So
    what became of the others' drafts is not seen, until a probe verifies some."""
    planner = ToldPlanner(*USELESS, v2=v2(1, 2, 3, 4))
    planner.costs.context = straight(0, 0)
    rows = planner.rows(names(4))
    planner.blocks.curves[rows[[0, 2]]] = 0.95, 0.9, 0.85, 0.8
    planner.blocks.last_step[rows] = 5, 7, 5, 6
    plan = planner.plans([4] * 4)
    assert (plan.drafted.all(), plan.lengths.tolist()) == (True, [4, 0, 4, 0])
    planner.beside.due = True
    plan = planner.plans([4] * 4)
    assert (plan.is_probe, plan.lengths.tolist()) == (True, [4, 0, 4, 3])
    # Probes that draft blocks begin anew, as the others' drafts pay.
    assert (planner.probes.asked, planner.probes.restarts) == ([], 2)


def test_a_probe_is_charged_a_share_of_a_plain_step_at_least() -> None:
    """Otherwise it would be due in every plan."""
    planner = ToldPlanner(*USELESS, v2=v2(1, 2, 3, 4))
    planner.costs = StepCosts(straight(10, 0.1), straight(0, 0), straight(0, 0), 64)
    planner.blocks.curves[planner.rows(names(2))[0]] = 0.95, 0.9, 0.85, 0.8
    assert planner.plans([4] * 2).lengths.tolist() == [4, 0]
    ((_, lost, _),) = planner.beside.asked
    assert lost == pytest.approx(LEAST_LOST * 0.0102)


# --- plain decoding -------------------------------------------------------------------------------


@pytest.mark.parametrize("of", ["V1", "V2"])
def test_where_drafting_pays_plain_decoding_is_measured_now_and_then(of: str) -> None:
    ours = ToldPlanner(0.9, 0.8, v2=v2() if of == "V2" else None)
    pays = ours.plans([2, 2])
    assert not pays.is_probe
    ((passed, lost, is_new),) = ours.checks.asked
    assert passed == pytest.approx(0.012)
    assert lost == pytest.approx((pays.rate * 0.006 - 1) * 0.012)
    assert is_new
    ours.checks.due = True
    plan = ours.plans([2, 2])
    assert (plan.runs_block, plan.is_probe, plan.lengths.any()) == (False, True, False)
    step = step_of(names(2), np.zeros(2, int), np.zeros(2, int))
    step.target_seconds, step.context_lens = 0.012, np.array([10, 10])
    ours.record_step(step)
    ours.plans([2, 2])
    assert not ours.checks.asked[-1][2]


def test_it_is_done_often_enough_where_drafting_hardly_pays() -> None:
    """It may not pay at all."""
    ours = ToldPlanner(*[0.3] * 7)
    ours.plans([1])
    assert ours.checks.asked[0][1] == pytest.approx(LEAST_LOST * 0.011)


def test_where_nothing_pays_it_is_measured_anyway() -> None:
    ours = ToldPlanner(*USELESS)
    ours.checks.due = True
    assert not ours.plans([4, 4]).is_probe
    assert ours.checks.asked == []


def test_of_a_batch_that_was_never_seen_plain_decoding_is_soon_measured() -> None:
    """And seldom afterwards."""
    ours = ToldPlanner(0.9, 0.8)
    ours.checks = Probes(share=LEAST_SHARE)  # type: ignore[assignment]

    def steps_until_plain() -> int:
        return next(number for number in numbers(1) if not ours.plans([2, 2]).runs_block)

    first = steps_until_plain()
    step = step_of(names(2), np.zeros(2, int), np.zeros(2, int))
    step.target_seconds, step.context_lens = 0.012, np.array([10, 10])
    ours.record_step(step)
    assert first < 40
    assert steps_until_plain() > 5 * first
