"""Which step is best, against a search of all possibilities."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.planner_world import curve, straight, straight_costs
from vllm_dflash.planning import Floats, Ints
from vllm_dflash.planning.costs import CATCH_UP_STEPS, Attention, StepCosts
from vllm_dflash.planning.search import (
    Batch,
    best_drafted,
    best_first,
    best_lengths,
    perfect_rate,
    rate_of,
    seconds_of,
    utility_of,
)
from vllm_dflash.planning.step import Plan

WIDTH = 3
# Few different values, so that ties are common.
rates = st.sampled_from([0.0, 0.25, 0.5, 0.75, 0.9, 1.0])
chains = st.lists(st.lists(rates, min_size=WIDTH, max_size=WIDTH), min_size=1, max_size=3)
contexts = st.lists(st.sampled_from([0, 500, 20_000]), min_size=3, max_size=3)
steps = st.lists(st.floats(0, 1), min_size=12, max_size=12)


def costs_of(increments: list[float], attention: Attention) -> StepCosts:
    """Return costs whose rows take 10 ms, and any time for each more."""
    verify = 10.0 + np.concatenate([[0.0], np.cumsum(increments)])
    points = dict(zip(range(1, len(verify) + 1), verify.tolist(), strict=True))
    return StepCosts(curve(points), straight(0.5, 0.25), straight(0.2, 0.05), 8, attention)


def all_lengths(limits: list[int]) -> Ints:
    return np.array([*product(*(range(limit + 1) for limit in limits))])


def summed(utility: Floats, lengths: Ints) -> float:
    return float(sum(one[:n].sum() for one, n in zip(utility, lengths, strict=True)))


def plain_of(costs: StepCosts, count: int, context: float) -> Plan:
    seconds = costs.plain(count, context)
    lengths = np.zeros(count, np.int64)
    return Plan.without_block(
        count, lengths=lengths, utility_per_second=count / seconds, rate=count / seconds
    )


@given(chains, contexts, steps, st.sampled_from([0.0, 1e-6, 1e-5]), st.floats(0, 500))
def test_the_best_n_drafts_are_prefixes_of_requests_drafts(
    conditional: list[list[float]],
    lens: list[int],
    increments: list[float],
    reading: float,
    per_second: float,
) -> None:
    """Compared with every combination of lengths, for every number of rows."""
    utility = utility_of(np.array(conditional).cumprod(axis=1))
    count, context = len(utility), np.array(lens[: len(utility)])
    costs = costs_of(increments, Attention(draft=reading))
    requests, gain, seconds = best_first(costs, utility, context, per_second)
    each = all_lengths([WIDTH] * count)
    gains = np.array([summed(utility, one) for one in each])
    times = np.array(
        [
            float(costs.target(count, count + one.sum(), context.sum(), one @ context))
            for one in each
        ]
    )
    for n in range(len(requests) + 1):
        lengths = np.bincount(requests[:n], minlength=count)
        assert gain[n] == pytest.approx(summed(utility, lengths))
        is_one = (each == lengths).all(axis=1)
        assert seconds[n] == pytest.approx(times[is_one][0])
        as_many = each.sum(axis=1) == n
        assert (
            gain[n] - per_second * seconds[n] >= (gains - per_second * times)[as_many].max() - 1e-9
        )
    assert (gain - per_second * seconds).max() >= (gains - per_second * times).max() - 1e-9


def test_of_equals_the_first_come_first() -> None:
    utility = np.array([[0.5, 0.5], [0.9, 0.5], [0.5, 0.5]])
    requests, gain, _ = best_first(straight_costs(), utility, np.zeros(3, np.int64), 0.0)
    assert requests.tolist() == [1, 0, 0, 1, 2, 2]
    assert gain.tolist() == pytest.approx([0, 0.9, 1.4, 1.9, 2.4, 2.9, 3.4])
    nothing = best_first(straight_costs(), np.zeros((2, 0)), np.zeros(2, np.int64), 1.0)
    assert [one.tolist() for one in nothing] == [[], [0.0], [0.012]]


def batch_of(blocks: Floats, **fields: Any) -> Batch:
    """Return a batch whose requests can use all drafts, and have no texts."""
    count, width = blocks.shape
    zeros = np.zeros(count, np.int64)
    batch = Batch(zeros, zeros + width, zeros, np.zeros((count, 0)), blocks)
    return batch._replace(**fields)


@given(
    chains,
    st.lists(st.integers(0, WIDTH), min_size=3, max_size=3),
    steps,
    st.sets(st.integers(1, WIDTH)),
    st.sampled_from([0.0, 0.0005, 0.005]),
    st.sampled_from([0.0, 0.002]),
)
def test_lengths_are_the_best_of_all(
    conditional: list[list[float]],
    most: list[int],
    increments: list[float],
    allowed: set[int],
    ragged_seconds: float,
    drafting: float,
) -> None:
    survival = np.array(conditional).cumprod(axis=1)
    count, limits = len(survival), np.array(most[: len(survival)])
    utility = np.where(np.arange(WIDTH) < limits[:, None], utility_of(survival), 0.0)
    costs, alike = costs_of(increments, Attention()), np.array(sorted(allowed), np.int64)
    batch, otherwise = batch_of(utility, max_drafts=limits), plain_of(costs, count, 0.0)
    same = {tuple(np.minimum(one, limits).tolist()) for one in alike.tolist()}

    def rate(lengths: Ints) -> tuple[float, float]:
        more = 0.0 if tuple(lengths.tolist()) in same else ragged_seconds
        seconds = costs.target(count, count + lengths.sum()) + drafting + more
        return float(rate_of(count, summed(utility, lengths), seconds)), float(seconds)

    found = best_lengths(batch, utility, otherwise, costs, drafting, alike, ragged_seconds)
    assert (found.lengths <= limits).all()
    own, seconds = rate(found.lengths)
    assert found.rate == pytest.approx(own)
    assert found.utility_per_second == pytest.approx(count / seconds)
    assert own == pytest.approx(max(rate(one)[0] for one in all_lengths(limits.tolist())))


@given(chains, steps, st.integers(1, 3), st.sampled_from([0, 1000]))
def test_who_is_drafted_and_how_wide_is_the_best_of_all(
    conditional: list[list[float]],
    increments: list[float],
    most: int,
    context: int,
) -> None:
    """Every subset of requests that gain differently and cost alike, with every width."""
    blocks = utility_of(np.array(conditional).cumprod(axis=1))
    count, attention = len(blocks), Attention(1e-6, 1e-6, 2e-6)
    costs, lens = costs_of(increments, attention), np.full(count, context)
    batch = batch_of(blocks, context_lens=lens)
    free = plain_of(costs, count, count * context)

    def rate(drafted: Ints, width: int) -> tuple[float, float]:
        number, verified = drafted.sum(), width * drafted.sum()
        total = count * context
        seconds = float(costs.target(count, count + verified, total, verified * context))
        seconds += float(costs.draft.at(number * (1 + width))) + 2e-6 * number * context
        seconds += float(costs.context.at(number))
        gain = float((blocks[:, :width].sum(axis=1) * drafted).sum())
        return float(rate_of(count, gain, seconds)), seconds

    found = best_drafted(costs, batch, free, np.array([1, 2, 3]), most)
    assert 1 <= found.drafted.sum() <= most
    own, seconds = rate(found.drafted.astype(int), found.width)
    assert found.rate == pytest.approx(own)
    assert found.utility_per_second == pytest.approx(count / seconds)
    assert seconds_of(costs, batch, found) == pytest.approx(seconds)
    subsets = [one for one in all_lengths([1] * count) if 1 <= one.sum() <= most]
    best = max(rate(one, width)[0] for one in subsets for width in (1, 2, 3))
    assert own == pytest.approx(best)


def drafted_of(
    batch: Batch, costs: StepCosts | None = None, free: Plan | None = None
) -> list[bool]:
    costs = costs or straight_costs()
    count = len(batch.max_drafts)
    free = free or plain_of(costs, count, float(batch.context_lens.sum()))
    return best_drafted(costs, batch, free, np.array([1, 2, 3]), count).drafted.tolist()


GOOD = utility_of(np.tile([0.95, 0.9, 0.85], (3, 1)))


def test_who_can_use_no_draft_is_not_drafted() -> None:
    assert drafted_of(batch_of(GOOD)) == [True] * 3
    assert drafted_of(batch_of(GOOD, max_drafts=np.array([3, 0, 3]))) == [True, False, True]


def test_a_request_with_a_better_text_keeps_it() -> None:
    """The step without blocks has all three of its text's drafts verified."""
    texts = np.zeros((3, 5))
    texts[1] = 0.99 ** np.arange(1, 6)
    free = plain_of(straight_costs(), 3, 0.0)
    free = replace(free, lengths=np.array([0, 5, 0]))
    assert drafted_of(batch_of(GOOD, texts=texts), free=free) == [True, False, True]


def test_who_reads_a_long_context_for_its_drafts_comes_last() -> None:
    costs = straight_costs(Attention(draft=5e-7))
    lens = np.array([200, 200_000, 200])
    assert drafted_of(batch_of(GOOD, context_lens=lens), costs) == [True, False, True]


def test_who_has_much_to_catch_up_is_drafted_if_that_pays_within_some_steps() -> None:
    """Storing context takes 0.05 ms a row, and is spread over 64 steps."""
    waiting = np.array([0, 40 * CATCH_UP_STEPS, 0])
    assert drafted_of(batch_of(GOOD)) == [True] * 3
    assert drafted_of(batch_of(GOOD, waiting=waiting)) == [True] * 3
    worse = GOOD * np.array([[1.0], [0.9], [1.0]])
    assert drafted_of(batch_of(worse)) == [True] * 3
    assert drafted_of(batch_of(worse, waiting=4 * waiting)) == [True, False, True]


@pytest.mark.parametrize("drafting_ms", [0.0, 60.0], ids=["cheap", "dear"])
@given(steps, st.integers(1, 4), st.sampled_from([0.0, 1e-6]))
def test_no_drafts_of_one_request_or_of_all_are_better_than_perfect_ones(
    drafting_ms: float, increments: list[float], count: int, reading: float
) -> None:
    costs = costs_of(increments, Attention(0.0, reading, reading))
    costs.draft = straight(drafting_ms, 0.25)
    batch = batch_of(np.ones((count, WIDTH)), context_lens=np.full(count, 700))
    ways = []
    for some, width in product({1, count}, range(1, WIDTH + 1)):
        drafts = some * width
        seconds = float(costs.target(count, count + drafts, 700.0 * count, 700.0 * drafts))
        seconds += float(costs.draft.at(some * (1 + width))) + reading * 700 * some
        seconds += float(costs.context.at(some))
        utility = utility_of(np.ones((some, width))).sum()
        ways.append(float(rate_of(count, utility, seconds)))
    assert perfect_rate(costs, batch) == pytest.approx(max(ways))
