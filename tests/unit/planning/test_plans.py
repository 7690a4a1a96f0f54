"""What is planned, with numbers worked out by hand.

n rows take 10 + n ms to verify, (2 + n) / 4 to draft, (4 + n) / 20 to store; see `ToldPlanner`.
"""

import numpy as np
import pytest

from support.told_planner import ToldPlanner, decoding
from vllm_dflash.planning.costs import Attention
from vllm_dflash.planning.forecast import Summary
from vllm_dflash.planning.step import Plan
from vllm_dflash.planning.thresholds import THRESHOLDS


@pytest.mark.parametrize(
    ("curve", "limits", "waiting", "width", "tokens", "ms"),
    [
        # One request and two drafts: 13 to verify, 1.25 to draft, and the context of 2 rows.
        ((0.8, 0.4), [2], [64], 2, 1 + 1.2, 13 + 1.25 + 0.3),
        # The second draft is not worth its 1.25 ms.
        ((0.8, 0.1), [2], [64], 1, 1 + 0.8, 12 + 1.0 + 0.3),
        # Or the second draft cannot be used.
        ((0.8, 0.8), [1], [64], 1, 1 + 0.8, 12 + 1.0 + 0.3),
        # The longest limit counts.
        ((0.9, 0.9), [1, 5], [0, 0], 2, 2 + 3.6, 16 + 2.0 + 0.3),
        # 32 rows wait for each drafted request: 1.5 rows a request each step.
        ((0.9, 0.9), [2, 0, 2], [16, 640, 48], 2, 3 + 3.6, 17 + 2.0 + 0.35),
    ],
)
def test_the_best_rate_is_planned(
    curve: tuple[float, ...],
    limits: list[int],
    waiting: list[int],
    width: int,
    tokens: float,
    ms: float,
) -> None:
    ours = ToldPlanner(2, *curve)
    plan = ours.plan(decoding(limits, waiting))
    assert plan.drafted.tolist() == [limit > 0 for limit in limits]
    assert plan.width == width
    assert plan.price == pytest.approx(1000 * tokens / ms)
    plain = 1000 * len(limits) / (10 + len(limits))
    assert plan.speedup == pytest.approx(plan.price / plain)
    assert (plan.is_probe, plan.min_verified, plan.holds_for) == (False, 0, 0)
    assert (ours.probes.restarts, ours.probes.asked) == (1, [])
    assert ours.forecast.asked == [[0.5] * len(limits)]


def two_groups() -> Summary:
    """Good requests and others, and for each group what is kept above each threshold: all drafts
    above the lowest, the first of a good request above all others."""
    above = len(THRESHOLDS) - 1
    return Summary(
        min_scores=np.array([0.5, -np.inf]),
        kept=np.array([[[1.0, 2.0], *[[1.0, 1.0]] * above], [[1.0, 2.0], *[[0.0, 0.0]] * above]]),
        gain=np.array([[[0.9, 1.7], *[[0.9, 0.9]] * above], [[0.1, 0.2], *[[0.0, 0.0]] * above]]),
        mean_first_worth=0.5,
        num_samples=2,
    )


def scored(ours: ToldPlanner) -> None:
    """Two requests whose last drafts had a first survival of 0.3 and 0.9. Scores: 0.4 and 0.7."""
    step = decoding([2, 2])
    step.plan = Plan(np.ones(2, dtype=bool), width=1, price=0.0, speedup=1.0)
    ours.plan(step)
    ours.decide_lengths(step, np.array([[0.3], [0.9]]))


def test_requests_of_which_little_is_expected_are_left_out() -> None:
    ours = ToldPlanner(2)
    ours.forecast.summary = two_groups()
    scored(ours)
    plan = ours.plan(decoding([2, 2]))
    assert plan.drafted.tolist() == [False, True]
    assert plan.width == 2
    # 4 rows to verify, 3 to draft, 1 to store.
    assert plan.price == pytest.approx(3700 / (14 + 1.25 + 0.25))
    assert ours.plan(decoding([2, 2])).speedup == pytest.approx(plan.price / (2000 / 12))
    # A request that is good enough, but can use no draft, is not drafted.
    assert not ours.plan(decoding([2, 0])).drafted.any()


@pytest.mark.parametrize(
    ("gain", "drafts", "is_close", "holds_for"),
    [
        # 1.25 ms for the block and its context, 12 to verify; plain decoding is one token in 11 ms.
        (0.22, True, None, 0),  # 1.0128 times as fast
        (0.21, False, True, 1),  # 1.0045
        (0.15, False, True, 1),  # 0.9547
        (0.14, False, False, 7),  # 0.9464
    ],
)
def test_drafting_must_promise_more_than_it_may_cost(
    gain: float, drafts: bool, is_close: bool | None, holds_for: int
) -> None:
    """One percent more. If it is less than five short of paying, it is planned again soon."""
    ours = ToldPlanner(1, gain)
    plan = ours.plan(decoding([1]))
    assert bool(plan.width) == plan.drafted.any() == drafts
    assert plan.holds_for == holds_for
    if not drafts:
        assert plan.price == pytest.approx(1000 / 11)
        assert (plan.speedup, plan.is_probe) == (1.0, False)
        assert ours.probes.restarts == 0
        ((seconds, _, close),) = ours.probes.asked
        assert seconds == pytest.approx((1 + holds_for) * 0.011)
        assert close is is_close


def test_nobody_who_could_be_drafted() -> None:
    ours = ToldPlanner(2, 0.9, 0.9)
    plan = ours.plan(decoding([0, 0, 0]))
    assert plan.drafted.tolist() == [False] * 3
    assert (plan.width, plan.holds_for) == (0, 0)
    assert ours.probes.asked == []


@pytest.mark.parametrize("gain", [0.0, 0.3])
def test_nothing_is_skipped_while_a_prompt_may_end(gain: float) -> None:
    """A request whose prompt ends stays in the same batch, so a skip would outlast its prompt."""
    ours = ToldPlanner(1, gain)
    step = decoding([1, 0])
    step.produced = np.array([1, 0])
    assert ours.plan(step).holds_for == 0
    assert ours.probes.asked[0][0] == pytest.approx(0.012)  # planned again after this step
    assert ours.plan(decoding([1, 0])).holds_for > 0


def test_a_probe_is_paid_with_the_least_that_finds_something_out() -> None:
    """That is the useless best plan, or as few requests as will do, whichever loses less."""
    ours = ToldPlanner(4, max_requests=64)
    ours.probes.due = True
    # The best is one draft each, none accepted: 20 requests' 40 rows to draft, 20 more to verify,
    # 20 to store: 50 + 10.5 + 1.2. That loses 31.7 ms, and stores the 20 waiting rows at once.
    # Two requests drafted to the full: 10 rows to draft, 6 to verify, 2 to store.
    waiting = [1] * 20
    plan = ours.plan(decoding([4] * 20, waiting))
    assert np.flatnonzero(plan.drafted).tolist() == [0, 1]
    assert (plan.width, plan.min_verified, plan.is_probe, plan.speedup) == (4, 3, True, 1.0)
    assert plan.price == pytest.approx(20_000 / 30)
    ((_, cost, _),) = ours.probes.asked
    assert cost == pytest.approx((3.0 + 6 + 0.3) / 1000)


def test_a_probe_costs_what_its_own_requests_take() -> None:
    """Four requests. One is at its limit, and the third has the least to catch up."""
    ours = ToldPlanner(4)
    ours.costs.records["attention"] = Attention(draft=1e-6, block=2e-6)
    ours.probes.due = True
    step = decoding([4, 0, 4, 4], [9, 1, 5, 700])
    step.context_lens = np.array([100, 50_000, 2_000, 300])
    assert ours.plan(step).drafted.tolist() == [False, False, True, False]
    ((_, cost, _),) = ours.probes.asked
    # 5 rows to draft, 3 more to verify, 5 to store; and its context is read for them.
    assert cost == pytest.approx((1.75 + 4 + 3 + 3 * 2 + 0.45) / 1000)


@pytest.mark.parametrize(
    ("count", "chosen"),
    [(1, 1), (15, 1), (16, 2), (33, 3), (64, 5)],
)
def test_a_probe_takes_one_request_and_one_more_for_sixteen(count: int, chosen: int) -> None:
    """These are the requests that can use drafts and have the least to catch up."""
    ours = ToldPlanner(4, max_requests=64)
    ours.probes.due = True
    waiting = [100 - request for request in range(count)]
    plan = ours.plan(decoding([4] * count, waiting))
    assert np.flatnonzero(plan.drafted).tolist() == list(range(count - chosen, count))
    unable = decoding([0] * (count - 1) + [4], waiting[::-1])
    assert np.flatnonzero(ours.plan(unable).drafted).tolist() == [count - 1]
