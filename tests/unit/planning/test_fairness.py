"""What drafts are worth, and which lengths that makes best, against brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.planner_world import names, straight_costs
from vllm_dflash.engine.v2.trees.tree_gain import ASSUMED_RATIO, TreeGain
from vllm_dflash.planning import Floats, Ints
from vllm_dflash.planning.planner import Planner
from vllm_dflash.planning.search import first_best, utility_of
from vllm_dflash.planning.step import Plan, Predicted, StepRecord

CHANCES = st.lists(st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3), min_size=1, max_size=4)
COSTS = straight_costs()
"""n rows take 10 + n ms."""


def survival_of(chances: list[list[float]]) -> Floats:
    return np.array(chances).cumprod(axis=1)


@given(CHANCES)
def test_worth_of_a_draft(chances: list[list[float]]) -> None:
    survival = survival_of(chances)
    utility = utility_of(survival)
    assert utility.cumsum(axis=1) == pytest.approx(np.log(1 + survival.cumsum(axis=1)))
    assert (np.diff(utility, axis=1) <= 1e-12).all(), "so the best n drafts are prefixes"


@given(CHANCES, st.integers(1, 9))
def test_worth_of_trees(chances: list[list[float]], count: int) -> None:
    """Requests alike, whose trees bring a quarter more than chains."""
    gain, accepted = TreeGain([7]), float(survival_of(chances)[0].sum())
    promise = count * float(np.log1p(accepted))
    seconds = np.array([0.05])
    bound = count * (1 + ASSUMED_RATIO * accepted) / 0.05
    for share, best in ((0.999, 0), (1.001, None)):
        plan = Plan.without_block(count, rate=share * bound, of_blocks=promise)
        assert gain.best(plan, seconds) == best


def test_of_values_that_rounding_may_have_set_apart_the_first_is_chosen() -> None:
    """Ranks decide separately."""
    assert first_best(np.array([0.1, 1.0, 1.0 + 1e-12, 0.9])) == 1
    assert first_best(np.array([0.1, 1.0, 1.0 + 1e-6, 0.9])) == 2
    assert first_best(np.array([1e6, 1e6 * (1 + 1e-12)])) == 0


def text_of_one(count: int) -> Ints:
    """Return free drafts to verify in a step of V1, of which the first request has 20 that are
    sure."""
    ours = Planner(1, count, straight_costs(), most_free=20)
    ours.blocks.typical[:] = ours.blocks.curves[:] = 0.0
    only = np.zeros(count, np.int64)
    only[0] = 20
    limits = np.zeros(count, np.int64)
    step = StepRecord(names(count), limits + 1, max_drafts=limits)
    step.predicted = Predicted(only, only * 500, *(only * 0,) * 3)
    step.plan = ours.plan(step.ids, step.context_lens, limits, predicted=step.predicted)
    return ours.choose(step, np.zeros((0, 0)))[0]


def test_no_request_waits_long_for_the_drafts_of_another() -> None:
    """1 token more of 21 takes 1 ms, a step of 32 requests 42 ms. All 20 would keep 31 requests
    waiting for 20 ms: those are verified that bring the one more than they cost the 32."""
    few = text_of_one(32)
    assert 0 <= few[0] <= 1
    assert not few[1:].any()
    assert text_of_one(1)[0] == 20, "alone, it keeps nobody waiting"


def test_v2_gives_few_draft_slots_to_the_only_copy_of_many() -> None:
    lengths = {}
    for count in (1, 32):
        ours = Planner(15, count)
        ours.start(straight_costs(), range(16))
        rows = ours.rows(names(count))
        ours.texts.curves[rows[0]] = 0.99 ** np.arange(1, 16)
        ours.blocks.curves[rows] = 0.0
        plan = ours.plan(names(count), np.full(count, 10), np.full(count, 15))
        lengths[count] = int(plan.lengths[0])
    assert lengths[32] <= 1
    assert lengths[1] >= 4
