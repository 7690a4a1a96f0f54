"""V1, once blocks are there: each request takes its block or its text, cut to what pays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.planner_world import names, step_of
from support.told_planner import ToldPlanner
from vllm_dflash.planning.acceptance import CURVE_RATE, GLOBAL_MEMORY, TRUST
from vllm_dflash.planning.step import BLOCK, NO_DRAFTS, TEXT, Plan, Predicted, StepRecord


def predicted(
    lengths: list[int], match: int = 8, num_observed: int = 0, num_correct: int = 0
) -> Predicted:
    ones = np.ones(len(lengths), dtype=np.int64)
    return Predicted(
        np.array(lengths), match * ones, num_observed * ones, num_correct * ones, match * ones
    )


def drafted_step(drafted: list[bool], limits: list[int] | None = None, **plan: Any) -> StepRecord:
    """Return a step that has drafted these; a row takes 1 ms."""
    count = len(drafted)
    step = StepRecord(names(count), np.ones(count, int), count)
    step.max_drafts = np.array(limits or [3] * count) * drafted
    step.plan = Plan(np.array(drafted), 3 * any(drafted), **{"utility_per_second": 100.0, **plan})
    return step


def chosen(block: list[float], match: int, **plan: Any) -> tuple[int, bool]:
    """Drafts of one request that are verified, and whether they are its text's, of which it has 3
    or none."""
    ours = ToldPlanner(0.9, 0.8, 0.7, most_free=3)
    step = drafted_step([bool(block)], **plan)
    step.predicted = predicted([3 * bool(match)], match)
    lengths, is_text = ours.choose(step, np.array([block]) if block else np.zeros((0, 0)))
    return int(lengths[0]), bool(is_text[0])


def test_a_request_takes_the_source_that_promises_more() -> None:
    """After a match of 8, 84% of predictions are right, and 86% and 87% of the next two."""
    assert TRUST[[2, 8, 9, 10]] == pytest.approx([0.54, 0.84, 0.85, 0.86], abs=0.01)
    assert chosen([0.9, 0.9, 0.9], 8) == (3, False)
    assert chosen([0.8, 0.8, 0.8], 8) == (3, True)
    assert chosen([0.8, 0.8, 0.8], 2) == (3, False)
    assert chosen([], 8) == (3, True)
    assert chosen([0.8], 0) == (1, False)
    assert chosen([], 0) == (0, False)
    # Each is cut where its drafts are not worth their row.
    assert chosen([0.8, 0.5, 0.5], 0, utility_per_second=150.0) == (2, False)
    assert chosen([], 8, utility_per_second=270.0) == (2, True)
    assert chosen([0.3, 0.3, 0.3], 2, utility_per_second=600.0) == (0, False)


def test_a_probe_verifies_the_block() -> None:
    """However little it is worth."""
    assert chosen([0.2, 0.1, 0.1], 40, utility_per_second=250.0) == (3, True)
    assert chosen([0.2, 0.1, 0.1], 40, utility_per_second=250.0, is_probe=True) == (3, False)
    assert chosen([0.2, 0.1, 0.1], 0, utility_per_second=250.0) == (0, False)
    assert chosen([0.2, 0.1, 0.1], 0, utility_per_second=250.0, is_probe=True) == (3, False)


@pytest.mark.parametrize(
    ("per_second", "limits", "is_probe", "lengths"),
    [
        # A row costs 1 ms, so a draft's utility must be a thousandth of that per second.
        (127, [3, 3], False, [3, 1]),
        (131, [3, 3], False, [2, 1]),
        (319, [3, 3], False, [2, 1]),
        (324, [3, 3], False, [1, 1]),
        (339, [3, 3], False, [1, 0]),
        (640, [3, 3], False, [1, 0]),
        (645, [3, 3], False, [0, 0]),
        (127, [1, 2], False, [1, 1]),
        (645, [3, 1], True, [3, 1]),
        (127, [2, 3], True, [2, 3]),
    ],
)
def test_drafts_are_cut_where_they_are_not_worth_their_time(
    per_second: float, limits: list[int], is_probe: bool, lengths: list[int]
) -> None:
    """Survival is 0.9, 0.72, 0.36 for one request, worth 0.642, 0.321 and 0.129; and 0.4, 0.04,
    0.004 for the other, worth 0.336, 0.028 and 0.003."""
    ours = ToldPlanner(0.9, 0.8, 0.7)
    step = drafted_step([True, True], limits, utility_per_second=per_second, is_probe=is_probe)
    confidence = np.array([[0.9, 0.8, 0.5], [0.4, 0.1, 0.1]])
    assert ours.choose(step, confidence)[0].tolist() == lengths


def test_a_step_that_repeats_a_plan_says_nothing_new_about_what_to_expect() -> None:
    """Its drafts are cut and verified as any."""
    ours = ToldPlanner(0.9, 0.8, 0.7)
    step = drafted_step([True])
    step.repeats_plan = True
    assert ours.choose(step, np.full((1, 3), 0.8))[0].tolist() == [3]
    row = ours.rows(names(1))[0]
    assert ours.blocks.num_observed[row] == 0
    assert ours.blocks.curves[row].tolist() == [0.9, 0.8, 0.7]
    assert ours._handed[row] == 3


def test_each_block_is_its_own_requests() -> None:
    """Five requests. The second and fourth were drafted; the second is unsure, the fourth is sure.
    The first has a text, and the third is at its limit."""
    ours = ToldPlanner(0.9, 0.8, 0.7, most_free=6)
    step = drafted_step([False, True, False, True, False])
    step.predicted = predicted([6, 0, 0, 0, 0], match=32)
    lengths, is_text = ours.choose(step, np.array([[0.01] * 3, [0.99] * 3]))
    assert lengths.tolist() == [6, 0, 0, 3, 0]
    assert is_text.tolist() == [True, False, False, False, False]
    rows = ours.rows(step.ids)
    assert ours._handed[rows].tolist() == [6, 0, 0, 3, 0]
    assert ours._source[rows].tolist() == [TEXT, NO_DRAFTS, NO_DRAFTS, BLOCK, NO_DRAFTS]
    assert ours._confidence[rows[3], :4].tolist() == [0.99, 0.99, 0.99, 0]
    assert ours.blocks.num_observed[rows].tolist() == [0, 1, 0, 1, 0]
    promised = 0.99 ** np.arange(1, 4)  # whatever the drafts are worth
    of_fourth = np.array([0.9, 0.8, 0.7]) * (1 - CURVE_RATE) + CURVE_RATE * promised
    assert ours.blocks.curves[rows[3]] == pytest.approx(of_fourth)


def verify(ours: ToldPlanner, verified: list[int], accepted: list[int], **more: Any) -> None:
    step = step_of(names(len(verified)), np.array(verified), np.array(accepted))
    for name, value in more.items():
        setattr(step, name, value)
    ours.learn_drafts(step)


def test_each_source_learns_from_its_own_drafts() -> None:
    """And of a text beside a block the first token counts: how many are known then shows how easy
    they were."""
    ours = ToldPlanner(0.9, 0.8, 0.7, most_free=6)
    step = drafted_step([False, True])
    step.predicted = predicted([6, 0], match=32)
    assert ours.choose(step, np.full((1, 3), 0.9))[0].tolist() == [6, 3]
    verify(ours, [6, 3], [3, 2], predicted=predicted([0, 0], 2, num_observed=3, num_correct=0))
    assert ours.blocks.of_all.tolist() == pytest.approx([3 * 0.9, 2])
    wrong = (1 - TRUST[32:36]).sum()  # three were right, and the fourth was not
    assert ours.texts.of_all.tolist() == pytest.approx(
        [GLOBAL_MEMORY * wrong + 1 - TRUST[2], GLOBAL_MEMORY + 1]
    )


def nothing_was_learned(ours: ToldPlanner) -> bool:
    return not ours.blocks.of_all.any() and not ours.texts.of_all.any()


def test_drafts_that_are_not_ours_teach_nothing() -> None:
    """vLLM pads a request that it admits or resumes with K placeholders."""
    ours = ToldPlanner(0.9, 0.8, 0.7)
    verify(ours, [3, 0], [0, 0])
    assert nothing_was_learned(ours)
    # Fewer drafts were handed over than are verified here, or none, so these are others.
    step = drafted_step([True, True], [2, 0])
    assert ours.choose(step, np.full((2, 3), 0.9))[0].tolist() == [2, 0]
    verify(ours, [3, 3], [0, 0])
    assert nothing_was_learned(ours)
    step.plan = Plan(step.plan.drafted, 3, utility_per_second=2000.0)
    assert ours.choose(step, np.full((2, 3), 0.9))[0].tolist() == [0, 0]
    verify(ours, [1, 0], [0, 0])
    assert nothing_was_learned(ours)


def test_drafts_are_verified_once() -> None:
    ours = ToldPlanner(0.9, 0.8, 0.7)
    ours.choose(drafted_step([True]), np.full((1, 3), 0.8))
    verify(ours, [3], [1])
    learned = ours.blocks.of_all.tolist()
    assert learned == pytest.approx([1.6, 1])
    verify(ours, [3], [1])
    assert ours.blocks.of_all.tolist() == learned


def test_where_all_have_good_matches_the_drafter_rests() -> None:
    ours = ToldPlanner(0.4, 0.2, 0.1, most_free=6)
    step = drafted_step([False, False])
    step.predicted = predicted([6, 6], match=32)
    step.plan = ours.plans([3, 3], predicted=step.predicted)
    assert step.plan.width == 0
    lengths, is_text = ours.choose(step, np.zeros((0, 0)))
    assert (lengths > 3).all()
    assert is_text.all()


def test_only_who_has_no_match_is_drafted() -> None:
    ours = ToldPlanner(0.9, 0.8, 0.7, most_free=6)
    found = predicted([6, 0], match=32)
    assert ours.plans([3, 3], predicted=found).drafted.tolist() == [False, True]
