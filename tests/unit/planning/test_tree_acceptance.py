"""What is learned of tokens that are not the likeliest, and what trees are taken to bring."""

from __future__ import annotations

import numpy as np
import pytest

from support.planner_world import curve
from vllm_dflash.planning import Floats
from vllm_dflash.planning.chances import Chances
from vllm_dflash.planning.costs import StepCosts
from vllm_dflash.planning.planner import Planner
from vllm_dflash.planning.step import Candidates, Likeliest, Plan, Step
from vllm_dflash.planning.tree_acceptance import (
    UNKNOWN,
    TreeAcceptance,
    best_rate,
    chain_chances,
    rows_are_cheap,
)

GPU = {1: 6.0, 64: 6.3, 256: 8.5}
CPU = {1: 14.4, 8: 21.3, 64: 75.9}


def costs_of(verify_ms: dict[int, float]) -> StepCosts:
    return StepCosts(curve(verify_ms), curve({1: 0.9, 64: 1.0}), curve({1: 0.05, 64: 0.06}), 4)


def drafted(chances: Floats, budget: int = 8) -> Step:
    """A step that has drafted one block of these chances, [w, P, C]."""
    width, _, count = chances.shape
    step = Step(["a"], np.array([1]), 1)
    step.plan = Plan(np.array([True]), width, price=100.0, speedup=1.0)
    step.limits = np.array([width])
    tokens = np.arange(width * count).reshape(1, width, count)
    step.candidates = Candidates(tokens, chances[None], np.array([True]), budget)
    return step


def test_trees_are_thought_of_where_rows_are_cheap() -> None:
    assert rows_are_cheap(curve(GPU))
    assert not rows_are_cheap(curve(CPU))


def test_the_likeliest_tokens_are_followed_from_place_to_place() -> None:
    free = np.array([[[0.2, 0.5, 0.1]], [[0.3, 0.1, 0.4]]])[None]
    found, order = chain_chances(free)
    assert order[0].tolist() == [[1, 0, 2], [2, 0, 1]]
    assert found[0] == pytest.approx(np.array([[0.5, 0.2, 0.1], [0.4, 0.3, 0.1]]))
    behind_each = np.array([[[0.1, 0.6], [0.6, 0.1]], [[0.9, 0.0], [0.3, 0.5]]])[None]
    _, order = chain_chances(behind_each)  # behind token 1, token 1 is the likeliest
    assert order[0].tolist() == [[1, 0], [1, 0]]


def learned(missed: int, times: int = 40) -> TreeAcceptance:
    """From chains of one whose second candidate had a chance of 0.2."""
    trees = TreeAcceptance(1, 2)
    step = drafted(np.array([[[0.5, 0.2, 0.1]]]))
    blocks = Chances.of(1, 2)
    for _ in range(times):
        trees.grow(step, np.array([0]), blocks, costs_of(GPU), np.array([[0.5]]))
        trees.learn(np.array([0]), np.array([1]), np.array([0]), np.array([missed]))
    return trees


def test_how_often_the_second_is_right_is_learned() -> None:
    rates = [learned(missed).ranks.acceptance(np.array([[0.2, 0.2]]))[0, 1] for missed in (1, 3)]
    assert rates[0] > 0.8
    assert rates[1] < 0.05


def test_nothing_is_learned_where_nobody_looked() -> None:
    assert not learned(UNKNOWN).ranks.seen.any()


def test_the_likeliest_is_learned_elsewhere() -> None:
    assert not learned(1).ranks.seen[0].any()


def test_the_best_rate_is_that_of_the_best_number_of_drafts() -> None:
    costs = costs_of(CPU)
    survival = np.array([0.3, 0.9, 0.0, 0.6])
    by_hand = []
    for count in range(5):
        tokens = 2 + np.sort(survival)[::-1][:count].sum()
        by_hand.append(tokens / (float(costs.decoding(2, np.array([2 + count]))[0]) + 0.001))
    assert best_rate(costs.records, 2, survival, 0.001) == pytest.approx(max(by_hand))


def planner_with(verify_ms: dict[int, float]) -> tuple[Planner, Step]:
    planner = Planner(2, 4, costs_of(verify_ms))
    step = drafted(np.tile(np.array([0.5, 0.3, 0.1]), (2, 1, 1)), budget=9)
    confidence = np.full((1, 2), 0.5)
    planner.plan(Step(["a"], np.array([1]), 1))
    step.lengths = planner.lengths(step, confidence)
    return planner, step


def test_cheap_rows_are_given_to_siblings_and_dear_ones_are_not() -> None:
    _, cheap = planner_with(GPU)
    _, dear = planner_with({1: 6.0, 64: 180.0})
    assert cheap.trees is not None
    assert dear.trees is not None
    assert cheap.lengths[0] > 6
    assert dear.lengths[0] <= 2


def test_trees_raise_the_price_of_time() -> None:
    planner, step = planner_with(GPU)
    before = planner.trees.gain
    assert before > 1.0
    for _ in range(100):
        planner.lengths(step, np.full((1, 2), 0.5))
    assert planner.trees.gain > before
    chain = Planner(2, 4, costs_of(GPU))
    assert chain.trees.gain == 1.0


def test_what_a_tree_teaches_of_chains_is_its_own_chain() -> None:
    """Five nodes of which two are the likeliest of their places: two were tried at most."""
    planner, step = planner_with(GPU)
    verified = Step(["a"], np.array([2]), 6, step.lengths)
    verified.likeliest = Likeliest(np.array([2]), np.array([0]), np.array([1]))
    verified.limits = np.array([2])
    planner.plan(verified)
    seen = planner.blocks.seen.sum(axis=1)
    assert seen == pytest.approx([1.0, 0.0])
