"""Drafts cost more as contexts grow: which requests are drafted then, and how it is learned."""

import numpy as np
import pytest

from support.levels import estimate_of
from support.planner_world import names, straight, straight_costs
from support.told_planner import ToldPlanner, decoding
from vllm_dflash.planning.ahead import AheadPlanner
from vllm_dflash.planning.costs import ATTENTION_RATE, FAR_CONTEXT, Attention, StepCosts
from vllm_dflash.planning.planner import Planner
from vllm_dflash.planning.step import Plan, StepEstimate, StepRecord


def with_attention(plain: float = 0.0, draft: float = 0.0, block: float = 0.0) -> StepCosts:
    """n rows take 10 + n ms, and each thousand tokens of context this much more."""
    costs = straight_costs()
    costs.records["attention"] = Attention(plain * 1e-6, draft * 1e-6, block * 1e-6)
    return costs


def of_contexts(*lens: int) -> StepRecord:
    step = decoding([2] * len(lens))
    step.context_lens = np.array(lens)
    return step


def told(costs: StepCosts, *curve: float) -> ToldPlanner:
    ours = ToldPlanner(2, *curve)
    ours.costs = costs
    return ours


def test_a_step_takes_longer_the_more_context_is_read() -> None:
    step = of_contexts(1000, 3000)
    step.rows, step.verified = 5, np.array([1, 2])
    step.plan = Plan(np.array([False, True]), width=2, price=0.0, speedup=1.0)
    step.draft_rows = 3
    estimate = estimate_of(with_attention(plain=1, draft=0.5, block=2), step)
    # 4000 tokens once, and 1000 + 2 * 3000 for drafts; a block over 3000.
    assert estimate.target_seconds * 1000 == pytest.approx(15 + 4 + 3.5)
    assert estimate.draft_seconds * 1000 == pytest.approx((2 + 3) / 4 + 6)
    assert estimate.plain_seconds * 1000 == pytest.approx(12 + 4)


def test_long_requests_are_left_out_and_short_ones_go_on() -> None:
    """Two drafts promise 1.7 tokens. Over 20,000 tokens each takes 10 ms more, over 200 nothing."""
    ours = told(with_attention(draft=0.5), 0.9, 0.8)
    assert ours.plan(of_contexts(200, 20_000)).drafted.tolist() == [True, False]
    assert ours.plan(of_contexts(200, 200)).drafted.tolist() == [True, True]
    ours = told(with_attention(block=1), 0.9, 0.8)
    assert ours.plan(of_contexts(200, 20_000)).drafted.tolist() == [True, False]


def test_beside_prompts_contexts_cost_as_much() -> None:
    costs = with_attention(plain=1, draft=1)
    costs.records["prompt_share"], costs.records["prompt_rows"] = 1.0, 64
    assert costs.plain(1, 5000) * 1000 == pytest.approx(1 + 5)
    seconds = costs.decoding(1, np.array([3]), 5000, 2 * 5000)
    assert seconds * 1000 == pytest.approx([3 + 5 + 2 * 5])


def test_a_long_request_alone_is_not_drafted_where_it_does_not_pay() -> None:
    ours = told(with_attention(plain=1, draft=2), 0.9, 0.8)
    assert ours.plan(of_contexts(500)).width == 2
    assert ours.plan(of_contexts(50_000)).width == 0
    # If only the step itself reads more, and not the drafts, drafting is worth more.
    ours = told(with_attention(plain=1), 0.9, 0.8)
    short, long = ours.plan(of_contexts(500)), ours.plan(of_contexts(50_000))
    assert long.speedup > short.speedup > 1


def test_drafts_behind_long_contexts_are_cut_first() -> None:
    """All drafts have the same chances; a row is worth 0.8 ms, and the long request's 2 ms more."""
    ours = told(with_attention(draft=0.1))
    step = of_contexts(100, 20_000)
    step.plan = Plan(np.ones(2, dtype=bool), width=2, price=400.0, speedup=1.0)
    assert ours.decide_lengths(step, np.full((2, 2), 0.9))[0].tolist() == [2, 0]
    step.context_lens = np.array([100, 100])
    step.ids = names(2, first=2)
    assert ours.decide_lengths(step, np.full((2, 2), 0.9))[0].tolist() == [2, 2]


def timed(lens: list[int], drafts: int, ms: float) -> StepRecord:
    step = of_contexts(*lens)
    step.verified = np.full(len(lens), drafts)
    step.rows = len(lens) * (1 + drafts)
    step.target_seconds = ms / 1000
    return step


def test_what_contexts_cost_is_learned_from_steps() -> None:
    """The profile knew nothing of it. Batches are long and short, drafted and not."""
    costs, truth = straight_costs(), Attention(2e-6, 1e-6, 0.0)
    rng = np.random.default_rng(0)
    for _ in range(3000):
        lens = [int(rng.choice([300, 8000, 30_000]))] * int(rng.choice([1, 4]))
        drafts = int(rng.choice([0, 3]))
        seconds = 0.010 + 0.001 * len(lens) * (1 + drafts)
        seconds += sum(lens) * (truth.plain + drafts * truth.draft)
        costs.observe(timed(lens, drafts, 1000 * seconds))
    assert costs.attention.plain == pytest.approx(truth.plain, rel=0.15)
    assert costs.attention.draft == pytest.approx(truth.draft, rel=0.15)
    assert costs.plain(1, 300) == pytest.approx(0.0116, rel=0.1)
    assert costs.plain(4, 4 * 30_000) == pytest.approx(0.254, rel=0.1)


def test_at_short_contexts_a_surprise_is_not_attentions() -> None:
    costs = straight_costs()
    for _ in range(20):
        costs.observe(timed([300], 0, 13.0))
    assert costs.plain(1, 300) == pytest.approx(0.013, rel=0.02)
    assert costs.attention.plain * 300 < 0.0001
    costs.observe(timed([FAR_CONTEXT], 0, 15.0))
    surprise = 0.015 - costs.plain(1, FAR_CONTEXT)
    before = costs.attention.plain
    costs.observe(timed([FAR_CONTEXT], 0, 15.0))
    grown = (costs.attention.plain - before) * FAR_CONTEXT
    assert grown == pytest.approx(ATTENTION_RATE * surprise / 2, rel=0.1)


def test_a_block_over_long_contexts_is_learned_too() -> None:
    costs = StepCosts.of(straight(10, 1), straight(1, 0), straight(0, 0), 8)
    for _ in range(400):
        for length in (200, 20_000):
            step = timed([length], 0, 11.0)
            step.plan = Plan(np.ones(1, dtype=bool), width=2, price=0.0, speedup=1.0)
            step.draft_rows, step.draft_seconds = 3, 0.001 + 1e-7 * length
            costs.observe(step)
    assert costs.attention.block == pytest.approx(1e-7, rel=0.05)
    assert costs.block(3, 200) == pytest.approx(0.00102, rel=0.05)


def after_a_block(step: StepRecord) -> tuple[float, float]:
    """Return the cost of a token of context and of 3 rows, learned from a step whose last request
    had a block."""
    costs = StepCosts.of(straight(10, 1), straight(1, 0), straight(0, 0), 8)
    is_last = np.arange(step.num_requests) == step.num_requests - 1
    step.plan = Plan(is_last, width=2)
    step.draft_rows, step.draft_seconds = 3, 0.0012
    costs.observe(step)
    return costs.attention.block, costs.block(3)


def test_a_block_beside_requests_without_one_teaches_as_much() -> None:
    """The length of its own context counts, and not how many other requests there are."""
    alone = after_a_block(timed([20_000], 0, 11.0))
    assert alone == pytest.approx(after_a_block(timed([20_000] * 4, 0, 14.0)))
    assert alone[0] > 0


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_blocks_are_drafted_where_reading_the_context_pays(runner: str) -> None:
    """A thousand tokens of context take a block 10 ms."""
    widths = []
    for length in (100_000, 1000):
        costs = with_attention(block=10)
        lens, one = np.array([length]), np.ones(1, np.int64)
        if runner == "V1":
            planner = Planner(7, 1, costs)
            step = StepRecord(["a"], one, 1, context_lens=lens, limits=7 * one)
            widths.append(planner.plan(step).width)
        else:
            ahead = AheadPlanner(7, 1)
            ahead.start(costs, range(8))
            widths.append(int(ahead.plan(["a"], lens).lengths.max()))
    assert widths[0] == 0 < widths[1]


def test_the_block_in_a_steps_time_is_one_over_its_contexts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Model Runner V2 cannot time blocks, and expects what the profile says."""
    planner, inferred = AheadPlanner(7, 1), []
    planner.start(with_attention(block=1), [7])
    observe = planner.costs.observe

    def observed(step: StepRecord) -> StepEstimate:
        inferred.append(step.inferred_seconds)
        return observe(step)

    monkeypatch.setattr(planner.costs, "observe", observed)
    for length in (50_000, 1000):
        step = timed([length], 0, 500.0)
        step.draft_rows = 8
        planner.observe(step, None)
    assert (inferred[0] - inferred[1]) * 1000 == pytest.approx(49)
