"""What a text predicts, planned together with the drafter's blocks."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.planner_world import (
    names,
    planner,
    rate_of,
    step_of,
    straight,
    straight_costs,
)
from support.told_planner import ToldPlanner, decoding
from vllm_dflash.engine.v1.host_step import FixedLength
from vllm_dflash.planning import Floats
from vllm_dflash.planning.chances import AGREEMENT, TRUST, Chances, expect_texts
from vllm_dflash.planning.chances import learn as learn_from
from vllm_dflash.planning.costs import StepCosts
from vllm_dflash.planning.forecast import Forecast
from vllm_dflash.planning.search import OfferedDrafts, UndraftedBatch, best_step, choose_lengths
from vllm_dflash.planning.step import Plan, Predicted

POOR_DRAFTER: dict[str, Any] = {"sure": 0.3, "unsure": 0.1}
NO_DRAFTS = np.zeros(0, dtype=np.int64)


def predicted(lengths: list[int], match: int = 8, known: int = 0, came_true: int = 0) -> Predicted:
    ones = np.ones(len(lengths), dtype=np.int64)
    return Predicted(np.array(lengths), match * ones, known * ones, came_true * ones)


def curves_of(free: Chances, rows: list[int], matches: list[int], lengths: list[int]) -> Floats:
    return expect_texts(free, np.array(rows), np.array(matches), np.array(lengths))


def learn(free: Chances, times: int, came_true: int, verified: int = 0) -> None:
    rows = np.array([0])
    for _ in range(times):
        free.num_verified[rows] = verified
        known = min(came_true + 1, 4) if verified else 1
        told = predicted([4], known=known, came_true=min(came_true, known))
        learn_from(free, rows, np.array([verified]), told.known, told.came_true)
        expect_texts(free, rows, told.matches, told.lengths)


@pytest.mark.parametrize("verified", [0, 4])
def test_nonsense_is_soon_worth_nothing(verified: int) -> None:
    """Whether it was ever verified or not."""
    free = Chances.of(4, 2)
    learn(free, 40, came_true=0, verified=verified)
    assert curves_of(free, [1], [8], [4])[0, 0] < 0.2
    assert curves_of(free, [0], [8], [4])[0, 0] < 0.03


def test_what_comes_true_is_soon_trusted_more() -> None:
    free = Chances.of(4, 2)
    learn(free, 40, came_true=4, verified=4)
    assert curves_of(free, [1], [8], [4])[0, 3] > 0.8 > TRUST[8] ** 4


def test_each_request_is_trusted_for_itself() -> None:
    free = Chances.of(4, 2)
    learn(free, 40, came_true=0)
    first, second = curves_of(free, [0, 1], [8, 8], [4, 4])[:, 0]
    assert first < second


curves_of_requests = st.lists(
    st.lists(st.floats(0.01, 0.99), min_size=3, max_size=3), min_size=1, max_size=5
)


@settings(max_examples=60, deadline=None)
@given(curves_of_requests, st.lists(st.integers(0, 4000), min_size=5, max_size=5))
def test_a_step_without_the_drafter_is_no_worse_than_any_threshold(
    rates: list[list[float]], contexts: list[int]
) -> None:
    """Nor is it worse than plain decoding, which is always possible."""
    costs, lens = straight_costs(), np.array(contexts[: len(rates)])
    curves = np.cumprod(np.array(rates), axis=1)
    nothing = np.zeros(len(rates), np.int64)
    batch = UndraftedBatch(nothing * 0.0, nothing, nothing, lens, curves)
    rest = best_step(costs.records, batch, Forecast(1, 1).summary, 0, False)
    seconds = costs.decoding(len(rates), len(rates) + np.arange(curves.size + 1))
    tokens = len(rates) + np.concatenate([[0.0], np.cumsum(-np.sort(-curves.ravel()))])
    assert rest.plain_rate == pytest.approx(tokens[0] / seconds[0])
    assert rest.undrafted_rate <= (tokens / seconds).max() * (1 + 1e-9)
    assert rest.undrafted_rate >= tokens[-1] / seconds[-1] * (1 - 1e-9)
    assert rest.undrafted_rate >= rest.plain_rate
    assert rest.row_seconds == pytest.approx(0.001)  # `straight_costs`


def chosen(
    block: list[float], text: list[float], row_worth: float = 0.1, *, is_probe: bool = False
) -> tuple[int, int]:
    """Drafts of one request's block and of its text that are verified, if rows cost nothing."""
    drafts = OfferedDrafts(
        np.array([block]) if block else np.zeros((0, 0)),
        np.array([bool(block)]),
        np.array([len(block)]),
        np.array([text]) if text else np.zeros((0, 0)),
        np.zeros(1, np.int64),
        *(1.0, row_worth, 0, is_probe),
    )
    free = StepCosts.of(straight(10, 0), straight(0, 0), straight(0, 0), 1).records
    blocks, texts = choose_lengths(free, drafts)
    return int(blocks[0]), int(texts[0])


def test_a_request_takes_the_source_that_promises_more() -> None:
    assert chosen([0.9, 0.8], [0.5]) == (2, 0)
    assert chosen([0.5, 0.2], [0.9, 0.8, 0.7]) == (0, 3)
    assert chosen([], [0.2]) == (0, 1)
    assert chosen([0.2], []) == (1, 0)
    assert chosen([], []) == (0, 0)
    # Drafts that are not worth their row do not count.
    assert chosen([0.5], [0.4, 0.3, 0.2], 0.3) == (1, 0)
    assert chosen([0.5], [0.4, 0.3, 0.2], 0.0) == (0, 3)


def test_each_of_a_batch_is_cut_by_its_own_block() -> None:
    """The second request is not drafted, and the first has a better text."""
    surest, drafted = [0.9, 0.8, 0.7], np.array([True, False, True, True])
    drafts = OfferedDrafts(
        np.array([[0.5, 0.2, 0.0], surest, [0.6, 0.0, 0.0]]),
        drafted,
        3 * drafted,
        np.array([surest, [0.4, 0.0, 0.0], np.zeros(3), np.zeros(3)]),
        np.zeros(4, np.int64),
        *(1.0, 0.1, 0, False),
    )
    free = StepCosts.of(straight(10, 0), straight(0, 0), straight(0, 0), 1).records
    blocks, texts = choose_lengths(free, drafts)
    assert blocks.tolist() == [0, 0, 3, 1]
    assert texts.tolist() == [3, 1, 0, 0]


def test_a_probe_verifies_the_block() -> None:
    assert chosen([0.2], [0.9], is_probe=True) == (1, 0)


def test_a_drafter_that_agrees_lengthens_the_trust_in_a_match() -> None:
    def lengths(agreed: int) -> tuple[list[int], list[bool]]:
        ours = ToldPlanner(2, 0.6, 0.3, most_free=6)
        step = decoding([2])
        step.predicted = predicted([6], match=2)
        step.plan = ours.plan(step)
        step.agreed = np.array([agreed])
        step.plan = Plan(np.array([True]), 2, price=500.0, speedup=1.0, uses_text=True)
        lengths, from_text = ours.decide_lengths(step, np.array([[0.9, 0.9]]))
        return lengths.tolist(), from_text.tolist()

    assert lengths(0) == ([2], [False])
    assert AGREEMENT * 2 + 2 == 18
    assert lengths(2) == ([6], [True])


def test_where_all_have_good_matches_the_drafter_rests() -> None:
    ours = ToldPlanner(2, 0.4, 0.2, most_free=6)
    step = decoding([2, 2])
    step.predicted = predicted([6, 6], match=32)
    plan = ours.plan(step)
    assert (plan.width, plan.uses_text) == (0, True)
    step.plan = plan
    lengths, from_text = ours.decide_lengths(step, np.zeros((0, 0)))
    assert (lengths > 3).all()
    assert from_text.all()


def test_only_who_has_no_match_is_drafted() -> None:
    ours = ToldPlanner(2, 0.9, 0.8, most_free=6)
    step = decoding([2, 2])
    step.predicted = predicted([6, 0], match=32)
    plan = ours.plan(step)
    assert plan.drafted.tolist() == [False, True]
    step.plan = plan
    lengths, from_text = ours.decide_lengths(step, np.full((1, 2), 0.99))
    assert lengths.tolist() == [6, 2]
    assert from_text.tolist() == [True, False]


def test_each_block_is_its_own_requests() -> None:
    """Five requests. The second and fourth were drafted; the second is unsure, the fourth is sure.
    The first has a text, and the third is at its limit."""
    ours = ToldPlanner(2, 0.9, 0.8, most_free=6)
    step = decoding([2, 2, 0, 2, 2])
    step.predicted = predicted([6, 0, 0, 0, 0], match=32)
    ours.plan(step)
    drafted = np.array([False, True, False, True, False])
    step.plan = Plan(drafted, 2, price=500.0, speedup=1.0, uses_text=True)
    lengths, _ = ours.decide_lengths(step, np.array([[0.01, 0.01], [0.99, 0.99]]))
    assert lengths.tolist() == [6, 0, 0, 2, 0]
    rows = ours._rows(step.ids)
    assert ours.block_chances.confidence[rows, 0].tolist() == [0.0, 0.01, 0.0, 0.99, 0.0]
    assert ours.block_chances.num_verified[rows].tolist() == [0, 0, 0, 2, 0]
    assert ours.text_chances.num_verified[rows].tolist() == [6, 0, 0, 0, 0]


def test_a_step_that_rests_verifies_what_the_text_predicts() -> None:
    ours = ToldPlanner(2, 0.9, 0.8, most_free=6)
    step = decoding([2, 2])
    step.is_resting, step.predicted = True, predicted([6, 0], match=32)
    step.plan = ours.plan(step)
    assert step.plan.width == 0
    assert ours.decide_lengths(step, np.zeros((0, 0)))[0].tolist() == [6, 0]


def test_each_source_learns_from_its_own_drafts() -> None:
    ours = ToldPlanner(2, 0.9, 0.8, most_free=6)
    step = decoding([2, 2])
    step.predicted = predicted([6, 0], match=32)
    step.plan = ours.plan(step)
    ours.decide_lengths(step, np.full((1, 2), 0.99))
    after = step_of(names(2), np.array([6, 2]), np.array([3, 2]))
    after.limits = np.full(2, 2)
    after.predicted = Predicted(
        np.zeros(2, int), np.zeros(2, int), np.array([4, 0]), np.array([3, 0])
    )
    ours.plan(after)
    assert ours.block_chances.accepted.sum() == pytest.approx(2)
    assert ours.text_chances.seen.sum() == pytest.approx(4)
    assert ours.text_chances.accepted.sum() == pytest.approx(3)


@pytest.mark.parametrize("num_requests", [1, 8, 32])
def test_a_source_of_nonsense_costs_under_one_percent(num_requests: int) -> None:
    nonsense: dict[str, Any] = {"predicts": 1.0, "predicted_truth": 0.02}
    without = rate_of(planner(), num_requests, steps=1500)
    assert rate_of(planner(), num_requests, steps=1500, **nonsense) > 0.99 * without


@pytest.mark.parametrize(("num_requests", "gain"), [(1, 1.5), (8, 1.3), (32, 1.1)])
def test_free_drafts_pay_where_a_drafter_does_not(num_requests: int, gain: float) -> None:
    told: dict[str, Any] = {"predicts": 0.4, "predicted_truth": 0.9}
    plain = rate_of(FixedLength(0), num_requests, **POOR_DRAFTER)
    assert rate_of(planner(), num_requests, **told, **POOR_DRAFTER) > gain * plain


@pytest.mark.parametrize("num_requests", [1, 8, 32])
def test_both_sources_together_are_no_worse_than_either(num_requests: int) -> None:
    told: dict[str, Any] = {"predicts": 0.3, "predicted_truth": 0.85}
    both = rate_of(planner(), num_requests, **told)
    assert both > 1.02 * rate_of(planner(), num_requests)
    assert both > 0.995 * rate_of(planner(), num_requests, **told, **POOR_DRAFTER)
