"""How many drafts of a step are verified: against all possible numbers, and by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.planner_world import curve, straight, straight_costs
from vllm_dflash.planning.budget import (
    ASSUMED_RATE,
    CANDIDATES,
    ENOUGH_REQUESTS,
    MOST_SAMPLED,
    Load,
    RecentWorths,
    best_budget,
)
from vllm_dflash.planning.costs import Attention, StepCosts

SURVIVAL = st.lists(st.floats(0.0, 1.0, width=32), max_size=40)


def seconds_of(load: Load, drafts: int) -> float:
    """Seconds of a step, by `straight_costs`."""
    return (10 + load.rows + drafts) / 1000


@given(SURVIVAL, st.integers(1, 8), st.integers(0, 12), st.integers(0, 9))
def test_no_other_number_brings_more_than_its_time_is_worth(
    survival: list[float], requests: int, wanted: int, block_requests: int
) -> None:
    """If a step only decodes, that is the best rate."""
    scores, most = np.sort(survival)[::-1], len(survival)
    load = Load(requests, requests, 0.0, 0.0, 8 * block_requests)
    found = best_budget(straight_costs(), load, scores, 1, most, wanted)
    assert 0 <= found <= most
    drafting = (2 + load.block_rows) / 4000 if block_requests else 0.0
    rates = [
        (requests + scores[:tried].sum()) / (seconds_of(load, tried) + drafting)
        for tried in range(most + 1)
    ]
    assert found >= min(wanted, most)
    if found > wanted:
        assert rates[found] == pytest.approx(max(rates), rel=1e-6)
    else:
        best = int(np.argmax(rates))
        assert best <= min(wanted, most) or rates[best] == pytest.approx(rates[found], rel=1e-6)


@given(st.integers(CANDIDATES + 1, 2000), st.floats(0.5, 0.999))
def test_among_many_it_is_nearly_the_best(most: int, rate: float) -> None:
    scores = rate ** np.arange(most)
    load = Load(4, 4, 0.0, 0.0, 0)
    rates = (4 + np.concatenate([[0], scores.cumsum()])) / (14 + np.arange(most + 1))
    found = best_budget(straight_costs(), load, scores, 1, most)
    assert rates[found] > 0.9 * rates.max()


def test_nothing_is_verified_that_is_worth_nothing() -> None:
    load = Load(4, 4, 0.0, 0.0, 32)
    assert best_budget(straight_costs(), load, np.zeros(28), 1, 28) == 0
    assert best_budget(straight_costs(), load, np.zeros(28), 1, 28, min_verified=3) == 3
    assert best_budget(straight_costs(), load, np.zeros(2), 1, 2, min_verified=3) == 2
    assert best_budget(straight_costs(), load, np.zeros(0), 1, 0) == 0


def test_chances_of_several_steps_are_those_of_one() -> None:
    scores = np.array([0.9, 0.6, 0.3, 0.05])
    load = Load(1, 1, 0.0, 0.0, 0)
    once = best_budget(straight_costs(), load, scores, 1, 4)
    assert once > 0
    assert best_budget(straight_costs(), load, np.repeat(scores, 5), 5, 4) == once


def test_beside_a_prompt_drafts_must_pay_for_themselves() -> None:
    """The step is long anyway, but a row still takes its time. If rows are free, all drafts go."""
    scores = np.full(8, 0.05)
    alone, beside = Load(2, 2, 0.0, 0.0, 0), Load(2, 2002, 0.0, 0.0, 0)
    assert best_budget(straight_costs(), alone, scores, 1, 8) == 0
    assert best_budget(straight_costs(), beside, scores, 1, 8) == 0
    flat = StepCosts.of(straight(10, 0), straight(1, 0), straight(0, 0), 8)
    assert best_budget(flat, beside, scores, 1, 8) == 8


def test_drafts_behind_long_contexts_cost_their_reading() -> None:
    costs = straight_costs()
    costs.records["attention"] = Attention(draft=1e-6)
    scores = np.full(4, 0.9)
    assert best_budget(costs, Load(1, 1, 100.0, 100.0, 0), scores, 1, 4) == 4
    assert best_budget(costs, Load(1, 1, 1e5, 1e5, 0), scores, 1, 4) == 0
    # Neither the step's own reading nor others' contexts are a reason to leave drafts out.
    assert best_budget(costs, Load(2, 2, 1e5, 100.0, 0), scores, 1, 4) == 4


@given(st.data())
def test_the_last_steps_of_each_slot_are_the_sample(data: st.DataObject) -> None:
    """Compared with lists, while slots are used and forgotten."""
    count, width = 5, 3
    recent = RecentWorths(count, width)
    assumed = [ASSUMED_RATE, ASSUMED_RATE**2, ASSUMED_RATE**3]
    known = [[assumed] * MOST_SAMPLED for _ in range(count)]
    slots = np.array([0])
    for _ in range(data.draw(st.integers(1, 25))):
        slots = np.array(
            data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=count, unique=True))
        )
        if data.draw(st.booleans()):
            recent.forget(int(slots[0]))
            known[slots[0]] = [assumed] * MOST_SAMPLED
        chances = np.array(
            [
                [data.draw(st.sampled_from([0.0, 0.25, 0.5, 1.0])) for _ in range(width)]
                for _ in slots
            ]
        )
        recent.add(slots, chances)
        for slot, row in zip(slots, chances, strict=True):
            known[slot] = [*known[slot][1:], np.cumprod(row).tolist()]
    drafts = np.array([data.draw(st.integers(0, width)) for _ in slots])
    scores, steps = recent.sample(slots, drafts)
    assert steps == min(-(-ENOUGH_REQUESTS // len(slots)), MOST_SAMPLED)
    expected = [
        one[draft]
        for slot, number in zip(slots, drafts, strict=True)
        for one in known[slot][-steps:]
        for draft in range(number)
    ]
    np.testing.assert_allclose(scores, sorted(expected, reverse=True), rtol=1e-6)


def test_where_rows_are_free_to_an_edge_it_goes_to_the_edge() -> None:
    costs = StepCosts.of(curve({1: 6.0, 16: 6.0, 32: 12.0}), straight(1, 0), straight(0, 0), 8)
    load = Load(4, 4, 0.0, 0.0, 0)
    assert best_budget(costs, load, np.full(28, 0.1), 1, 28) == 12


def test_a_block_costs_what_it_attends_to() -> None:
    """A step with a longer block has a lower rate, so more drafts are worth their time."""
    costs = straight_costs()
    costs.records["attention"] = Attention(block=1e-6)
    load, scores = Load(1, 1, 1e5, 0.0, 8), np.array([0.5, 0.08, 0.06, 0.04])
    found = [
        best_budget(costs, load._replace(block_context=context), scores, 1, 4)
        for context in (0.0, 1e4, 1e5)
    ]
    assert found == sorted(found)
    assert found[0] < found[2]
