"""Whether a step is worth trees: by what rows take, and what trees were seen to bring."""

from __future__ import annotations

import numpy as np
import pytest

from support.planner_world import straight
from vllm_dflash.planning.costs import StepCosts
from vllm_dflash.planning.tree_gain import HOPED, TreeGain

YES, NO = np.array([True]), np.array([False])


def pays(gain: TreeGain, row_seconds: float, requests: int = 1, promise: float = 2.0) -> bool:
    """31 nodes of each request against a chain of two rows more."""
    costs = StepCosts.of(straight(10.0, row_seconds), *(straight(0.0, 0.0),) * 2, 8)
    nodes, context = np.full(requests, 31), np.full(requests, 100)
    chain = float(costs.decoding(requests, np.array([3 * requests]))[0])
    rate = requests * (1.0 + promise) / chain
    return gain.pays(costs, nodes, context, requests * promise, rate, 8 * requests)


def test_cheap_rows_are_worth_trees_and_dear_ones_are_not() -> None:
    gain = TreeGain()
    assert gain.ratio == HOPED
    assert pays(gain, 0.01)
    assert not pays(gain, 1.0)
    assert not pays(gain, 0.01, promise=0.0)


def test_more_requests_make_a_step_of_trees_longer() -> None:
    assert [pays(TreeGain(), 0.03, requests) for requests in (1, 16)] == [True, False]


def test_what_trees_brought_counts() -> None:
    """Of requests that had some."""
    gain = TreeGain()
    for _ in range(100):
        both, had = np.array([4, 9]), np.array([True, False])
        gain.observe(both, both, had)
    assert gain.ratio == pytest.approx(1.0, abs=0.05)
    assert not pays(gain, 0.01)
    for _ in range(600):
        gain.observe(np.array([6]), np.array([4]), YES)
    assert gain.ratio == pytest.approx(1.5, abs=0.05)
    assert pays(gain, 0.01)


def test_trees_that_did_not_pay_are_tried_again_one_day() -> None:
    gain = TreeGain()
    for _ in range(100):
        gain.observe(np.array([4]), np.array([4]), YES)
    before = gain.ratio
    for _ in range(3000):
        gain.observe(np.array([4]), np.array([4]), NO)
    assert before < 1.05 < 1.2 < gain.ratio
    assert pays(gain, 0.01)
