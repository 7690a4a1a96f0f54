"""Blocks are planned by the cost of their rows: K, and one more if the bonus row predicts none."""

from __future__ import annotations

import numpy as np
import pytest

from support.planner_world import names, straight
from vllm_dflash.planning import Floats, Ints
from vllm_dflash.planning.costs import Curve, StepCosts
from vllm_dflash.planning.planner import Planner
from vllm_dflash.planning.search import Batch, best_drafted, perfect_rate, seconds_of
from vllm_dflash.planning.step import Plan

K, REQUESTS = 7, 3
CONTEXT, LIMITS = np.full(REQUESTS, 100), np.full(REQUESTS, K)


class Watched(Curve):
    """A curve of the drafter that keeps the row counts it is asked for."""

    def __init__(self) -> None:
        known = straight(0.5, 0.25)
        super().__init__(known.counts, known.seconds)
        self.asked: set[int] = set()

    def at(self, counts: Ints | Floats | float) -> Floats:
        self.asked |= {int(count) for count in np.ravel(counts)}
        return super().at(counts)


@pytest.fixture
def blocks() -> Watched:
    return Watched()


@pytest.fixture(params=[0, 1])
def first(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def costs(blocks: Watched, first: int) -> StepCosts:
    return StepCosts(straight(10, 1), blocks, straight(0.2, 0.05), 64, first_draft_row=first)


def test_on_v2_all_requests_have_whole_blocks(
    costs: StepCosts, blocks: Watched, first: int
) -> None:
    planner = Planner(K, 64)
    planner.start(costs, range(K + 1))
    planner.plan(names(REQUESTS), CONTEXT, LIMITS)
    assert blocks.asked == {REQUESTS * (first + K)}
    blocks.asked.clear()
    planner.seconds(LIMITS[None], CONTEXT)
    assert blocks.asked == {REQUESTS * (first + K)}


def test_on_v1_any_number_of_blocks_has_any_width(
    costs: StepCosts, blocks: Watched, first: int
) -> None:
    worth = np.full((REQUESTS, K), 0.5)
    batch = Batch(CONTEXT, LIMITS, np.zeros(REQUESTS, np.int64), np.zeros((REQUESTS, 0)), worth)
    none = Plan.without_block(
        REQUESTS, lengths=np.zeros(REQUESTS, np.int64), utility_per_second=1.0, rate=1.0
    )
    widths = np.array([2, 5])
    plan = best_drafted(costs, batch, none, widths, REQUESTS)
    assert blocks.asked == {n * (first + width) for n in (1, 2, 3) for width in (2, 5)}
    blocks.asked.clear()
    seconds_of(costs, batch, plan)
    assert blocks.asked == {int(plan.drafted.sum()) * (first + plan.width)}
    blocks.asked.clear()
    perfect_rate(costs, batch)
    assert blocks.asked == {n * (first + k) for n in (1, REQUESTS) for k in range(1, K + 1)}
