"""Objectives: what drafts are worth, and which lengths that makes best, against brute force."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.planner_world import names, straight_costs
from support.told_planner import ToldPlanner, decoding
from vllm_dflash.planning import Floats, Ints
from vllm_dflash.planning.ahead import AheadPlanner
from vllm_dflash.planning.objective import price_of, rate_of, worth_of
from vllm_dflash.planning.places import Expected, best_lengths
from vllm_dflash.planning.search import cut_chains
from vllm_dflash.planning.step import Predicted
from vllm_dflash.planning.tree_gain import ASSUMED_RATIO, TreeGain

CHANCES = st.lists(st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3), min_size=1, max_size=4)
COSTS = straight_costs()
"""n rows take 10 + n ms."""


def survival_of(chances: list[list[float]]) -> Floats:
    return np.array(chances).cumprod(axis=1)


@given(CHANCES)
def test_worth_of_a_draft(chances: list[list[float]]) -> None:
    survival = survival_of(chances)
    assert worth_of(survival, False) is survival
    worth = worth_of(survival, True)
    assert worth.cumsum(axis=1) == pytest.approx(np.log(1 + survival.cumsum(axis=1)))
    assert (np.diff(worth, axis=1) <= 1e-12).all(), "so the best n drafts are prefixes"


def speeds(survival: Floats, lengths: Ints, drafting_seconds: float = 0.0) -> Floats:
    """Tokens per second of each request, [R]."""
    seconds = (10 + len(lengths) + lengths.sum()) / 1000 + drafting_seconds
    accepted = [curve[:length].sum() for curve, length in zip(survival, lengths, strict=True)]
    return (1 + np.array(accepted)) / seconds


@pytest.mark.parametrize("fair", [False, True])
@given(CHANCES)
def test_no_lengths_have_a_better_mean_speed(fair: bool, chances: list[list[float]]) -> None:
    """Brute force. The price is that of the best step, as when the forecast is right."""
    survival = survival_of(chances)
    count = len(survival)

    def mean(lengths: Ints) -> float:
        each = speeds(survival, lengths)
        return float(np.exp(np.log(each).mean()) if fair else each.mean())

    best = max((np.array(one) for one in product(range(4), repeat=count)), key=mean)
    seconds = (10 + count + np.arange(3 * count + 1)) / 1000
    worth = worth_of(survival, fair)
    total = float(sum(curve[:length].sum() for curve, length in zip(worth, best, strict=True)))
    rate = rate_of(count, total, float(seconds[best.sum()]), fair)
    assert rate == pytest.approx(count * mean(best))
    price = price_of(count, rate, float(seconds[best.sum()]), fair)
    found = cut_chains(worth, np.full(count, 3), seconds, price)
    assert mean(found) == pytest.approx(mean(best), rel=1e-9)


@given(st.lists(st.floats(0.05, 1.0), min_size=3, max_size=3), st.integers(1, 40))
def test_for_requests_alike_both_objectives_are_the_same(chances: list[float], count: int) -> None:
    curve = np.cumprod(chances)
    plans = []
    for fair in (False, True):
        curves = worth_of(np.tile(curve, (count, 1)), fair)
        zeros = np.zeros(count, np.int64)
        expected = Expected(zeros + 3, zeros, zeros * 0.0, curves, zeros - 1, 0.002)
        plans.append(best_lengths(COSTS.records, expected, np.array([1, 2, 3]), 1.0, fair))
    (lengths, rate), (fair_lengths, fair_rate) = plans
    assert fair_rate == pytest.approx(rate)
    # Two lengths may be equally good.
    tokens = 1 + np.append(0.0, curve.cumsum())[[lengths[0], fair_lengths[0]]]
    seconds = (10 + count * (1 + np.array([lengths[0], fair_lengths[0]]))) / 1000 + 0.002
    assert count * tokens / seconds == pytest.approx(rate)


@given(CHANCES, st.integers(1, 9))
def test_worth_of_trees(chances: list[list[float]], count: int) -> None:
    """Requests alike, whose trees bring a quarter more than chains."""
    gain, accepted = TreeGain([7]), float(survival_of(chances)[0].sum())
    promise = count * float(np.log1p(accepted))
    seconds = np.array([0.05])
    bound = count * (1 + ASSUMED_RATIO * accepted) / 0.05
    assert gain.best(count, promise, seconds, 0.999 * bound, fair=True) == 0
    assert gain.best(count, promise, seconds, 1.001 * bound, fair=True) is None


def text_of_one(fair: bool, count: int) -> Ints:
    """Free drafts to verify in a step of V1, of which the first request has 20 that are sure."""
    ours = ToldPlanner(1, 0.0, max_requests=count, most_free=20, fair=fair)
    ours.text_chances.rates[:] = 1.0
    step = decoding([0] * count)
    only = np.zeros(count, np.int64)
    only[0] = 20
    step.predicted = Predicted(only, only * 10, only * 0, only * 0)
    step.plan = ours.plan(step)
    step.agreed = np.zeros(count, np.int64)
    if not step.plan.uses_text:
        return only * 0
    return ours.decide_lengths(step, np.zeros((0, 0)))[0]


def test_no_request_waits_long_for_the_drafts_of_another() -> None:
    """1 token more of 21 takes 1 ms, a step of 32 requests 42 ms: throughput has all 20 verified
    and every request wait 20 ms; fair has those that bring the one more than they cost the 32."""
    assert text_of_one(False, 32).tolist() == [20] + [0] * 31
    few = text_of_one(True, 32)
    assert 0 <= few[0] <= 1
    assert text_of_one(True, 1)[0] == 20, "alone, it keeps nobody waiting"


def test_v2_gives_fewer_places_to_the_only_copy_of_many() -> None:
    count = 32
    lengths = {}
    for fair in (False, True):
        ours = AheadPlanner(15, count, fair=fair)
        ours.start(COSTS, range(16))
        rows = ours._rows(names(count))
        ours.promises[rows] = 0.0
        ours.promises[rows[0]] = 0.99 ** np.arange(1, 16)
        lengths[fair] = ours.plan(names(count), np.full(count, 10)).lengths
    assert lengths[False][0] == 15
    assert lengths[True][0] <= 1
