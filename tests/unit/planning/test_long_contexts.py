"""Drafts cost more as contexts grow: which requests are drafted then, and how many are verified."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.planner_world import names, straight_costs
from support.told_planner import ToldPlanner, v2
from vllm_dflash.planning.costs import Attention, StepCosts
from vllm_dflash.planning.planner import Planner
from vllm_dflash.planning.step import Plan, StepRecord


def with_attention(plain: float = 0.0, draft: float = 0.0, block: float = 0.0) -> StepCosts:
    """n rows take 10 + n ms, and each thousand tokens of context this much more."""
    return straight_costs(Attention(plain * 1e-6, draft * 1e-6, block * 1e-6))


def timed(lens: list[int], drafts: int, ms: float) -> StepRecord:
    count = len(lens)
    step = StepRecord(names(count), np.ones(count, int), count * (1 + drafts))
    step.verified, step.context_lens = np.full(count, drafts), np.array(lens)
    step.target_seconds = ms / 1000
    return step


def told(costs: StepCosts, *curve: float) -> ToldPlanner:
    ours = ToldPlanner(*curve, costs=costs)
    ours.blocks.num_observed[ours.rows(names(4))] = 1  # nothing is new
    return ours


def test_a_step_takes_longer_the_more_context_is_read() -> None:
    step = timed([1000, 3000], 0, 22.5)
    step.rows, step.verified = 5, np.array([1, 2])
    step.plan = Plan(np.array([False, True]), width=2)
    step.draft_rows, step.draft_seconds = 3, 0.00725
    costs = with_attention(plain=1, draft=0.5, block=2)
    # 4000 tokens once, and 1000 + 2 * 3000 for drafts; a block over 3000.
    assert costs.plain(2, 4000) * 1000 == pytest.approx(12 + 4)
    assert costs.target(2, 5, 4000, 7000) * 1000 == pytest.approx(15 + 4 + 3.5)
    assert costs.blocks(1, 2, 3000) * 1000 == pytest.approx((2 + 3) / 4 + 6 + (4 + 1) / 20)
    # A step that takes as long as that teaches nothing.
    costs.record_step(step)
    assert costs.target(2, 5, 4000, 7000) * 1000 == pytest.approx(15 + 4 + 3.5)
    assert costs.draft.at(3) * 1000 == pytest.approx((2 + 3) / 4)


def test_long_requests_are_left_out_and_short_ones_go_on() -> None:
    """Two drafts promise 1.7 tokens. Over 20,000 tokens each takes 10 ms more, over 200 nothing."""
    ours = told(with_attention(draft=0.5), 0.9, 0.8)
    assert ours.plans([2, 2], [200, 20_000]).drafted.tolist() == [True, False]
    assert ours.plans([2, 2], [200, 200]).drafted.tolist() == [True, True]
    ours = told(with_attention(block=1), 0.9, 0.8)
    assert ours.plans([2, 2], [200, 20_000]).drafted.tolist() == [True, False]


def test_a_long_request_alone_is_not_drafted_where_it_does_not_pay() -> None:
    ours = told(with_attention(plain=1, draft=2), 0.9, 0.8)
    assert ours.plans([2], [500]).width == 2
    assert ours.plans([2], [50_000]).width == 0
    # If only the step itself reads more, and not the drafts, drafting is worth more.
    ours = told(with_attention(plain=1), 0.9, 0.8)
    short, long = ours.plans([2], [500]), ours.plans([2], [50_000])
    plain = 1000 / 11.5, 1000 / 61
    assert long.rate / plain[1] > short.rate / plain[0] > 1


def test_drafts_behind_long_contexts_are_cut_first() -> None:
    """All drafts have the same chances; a row must bring 0.3, and the long request's 0.6 more."""
    ours = told(with_attention(draft=0.1), 0.9, 0.8)
    step = timed([100, 20_000], 0, 0.0)
    step.plan, step.max_drafts = (
        Plan(np.ones(2, dtype=bool), width=2, utility_per_second=300.0),
        np.array([2, 2]),
    )
    assert ours.choose(step, np.full((2, 2), 0.9))[0].tolist() == [2, 0]
    step.context_lens = np.array([100, 100])
    assert ours.choose(step, np.full((2, 2), 0.9))[0].tolist() == [2, 2]


def test_a_block_beside_requests_without_one_teaches_as_much() -> None:
    """The length of its own context counts, and not how many other requests there are."""

    def after(lens: list[int], seconds: float) -> Any:
        costs, step = with_attention(block=0.1), timed(lens, 0, 10.0 + len(lens))
        step.plan = Plan(np.arange(len(lens)) == len(lens) - 1, width=2)
        step.draft_rows, step.draft_seconds = 3, seconds
        costs.record_step(step)
        return costs.draft.at(np.array([3, 64]))

    as_expected = after([20_000], 0.00325)  # (2 + 3) / 4, and 2 for its context
    assert as_expected * 1000 == pytest.approx([1.25, 16.5])
    slower = after([20_000], 0.004)
    assert slower[0] > as_expected[0]
    assert slower == pytest.approx(after([90_000, 70_000, 300, 20_000], 0.004))


@pytest.mark.parametrize("of", ["V1", "V2"])
def test_blocks_are_drafted_where_reading_the_context_pays(of: str) -> None:
    """A thousand tokens of context take a block 10 ms."""
    widths = []
    for length in (100_000, 1000):
        rules = {"v2": v2()} if of == "V2" else {}
        planner = ToldPlanner(*0.9 ** np.arange(1, 8), costs=with_attention(block=10), **rules)
        widths.append(planner.plans([7], [length]).width)
    assert widths[0] == 0 < widths[1]


def test_the_block_in_a_steps_time_is_one_over_its_contexts() -> None:
    """Model Runner V2 cannot time blocks, and expects what the profile says."""
    planner = Planner(7, 1)
    planner.start(with_attention(block=1), [7])
    for length in (50_000, 1000):
        step = timed([length], 0, 11 + (2 + 8) / 4 + length / 1000)
        step.draft_rows = 8
        planner.record_step(step)
        assert planner.costs.plain(1) * 1000 == pytest.approx(11)
