"""The planner in a simulated engine: never worse than the best fixed length, or no drafts."""

import inspect
from typing import Any

import numpy as np
import pytest

from support.planner_world import World, names, planner, rate_of
from vllm_dflash.engine.v1.host_step import FixedLength
from vllm_dflash.planning.planner import Planner

USELESS: dict[str, Any] = {"sure": 0.02, "unsure": 0.02, "overrated": 0.1}
"""Drafts that are never accepted, though the drafter is sure of them."""
LENGTHS = (1, 2, 3, 5, 7)


@pytest.mark.parametrize("num_requests", [1, 4, 16, 32, 64])
def test_at_least_as_fast_as_plain_and_any_fixed_length(num_requests: int) -> None:
    fixed = [rate_of(FixedLength(length), num_requests) for length in LENGTHS]
    best = max(rate_of(FixedLength(0), num_requests), *fixed)
    assert rate_of(planner(), num_requests) > 0.99 * best


@pytest.mark.parametrize("num_requests", [1, 4, 16, 64])
def test_useless_drafts_cost_next_to_nothing(num_requests: int) -> None:
    ours = rate_of(planner(), num_requests, steps=1500, **USELESS)
    assert ours > 0.985 * rate_of(FixedLength(0), num_requests, steps=1500, **USELESS)


@pytest.mark.parametrize(("num_requests", "hidden_ms"), [(1, 60.0), (4, 60.0), (8, 45.0)])
def test_drafts_that_take_longer_than_profiled_are_not_charged_to_plain_decoding(
    num_requests: int, hidden_ms: float
) -> None:
    """If every step verifies drafts, only a check shows that plain decoding is faster."""
    world = {"sure": 0.9, "unsure": 0.9, "hidden_ms": hidden_ms}
    ours = rate_of(planner(), num_requests, steps=1000, **world)
    assert ours > 0.95 * rate_of(FixedLength(0), num_requests, steps=1000, **world)


@pytest.mark.parametrize("overrated", [0.4, 2.5])
@pytest.mark.parametrize("num_requests", [1, 8, 16])
def test_a_drafter_that_misjudges_itself(num_requests: int, overrated: float) -> None:
    """Confidence is calibrated, so it costs little if it is too high or too low."""
    honest = rate_of(planner(), num_requests, steps=1000)
    assert rate_of(planner(), num_requests, steps=1000, overrated=overrated) > 0.96 * honest


def test_choosing_by_request_beats_every_fixed_length_around_the_crossover() -> None:
    best = max(rate_of(FixedLength(0), 16), *(rate_of(FixedLength(k), 16) for k in LENGTHS))
    assert rate_of(planner(), 16) > 1.05 * best


def test_probes_become_rare_but_never_cease() -> None:
    world = World(planner(), **USELESS)
    world.run(names(8), 4000)
    gaps = np.diff(world.drafted_steps)
    assert gaps[-5:].mean() > 3 * np.median(gaps[:5])
    assert gaps.max() < 400


def test_drafting_starts_within_a_few_dozen_steps_when_load_falls() -> None:
    world = World(planner())
    world.run(names(64), 400)
    assert sum(step >= 350 for step in world.drafted_steps) < 10
    world.run(names(1), 40)
    assert sum(step >= 400 for step in world.drafted_steps) >= 30


def test_drafting_stops_within_a_few_dozen_steps_when_load_rises() -> None:
    world = World(planner())
    world.run(names(1), 400)
    world.run(names(64), 80)
    assert sum(step >= 450 for step in world.drafted_steps) < 10


@pytest.mark.parametrize(("before", "after"), [(1, 16), (64, 1), (32, 4)])
def test_what_other_batches_took_misleads_for_a_few_steps_only(before: int, after: int) -> None:
    """Steps of a size without drafts are unknown when it first occurs."""
    world = World(planner())
    world.run(names(before), 200)
    tokens, seconds = world.tokens, world.seconds
    world.run(names(after), 200)
    rate = (world.tokens - tokens) / (world.seconds - seconds)
    assert rate > 0.95 * rate_of(planner(), after, steps=200)


def test_drafting_follows_the_text() -> None:
    """Easy, useless, easy again. Drafting goes on, stops within dozens of steps, and goes on again
    after a probe."""
    world = World(planner())
    world.run(names(4), 200)
    world.sure, world.unsure, world.overrated = 0.02, 0.02, 0.1
    world.run(names(4), 200)
    off = sum(250 <= step < 400 for step in world.drafted_steps)
    world.sure, world.unsure, world.overrated = 0.93, 0.45, 1.0
    world.run(names(4), 600)
    on = sum(step >= 800 for step in world.drafted_steps)
    assert off < 40
    assert on > 180


def test_new_requests_start_from_what_others_have_shown() -> None:
    """A stream of requests of six steps each does as well as endless ones."""
    world, first = World(planner()), 0
    for _ in range(60):
        world.run(names(4, first), 6)
        first += 4
    before = world.tokens, world.seconds
    for _ in range(60):
        world.run(names(4, first), 6)
        first += 4
    ours = (world.tokens - before[0]) / (world.seconds - before[1])
    assert ours > 1.3 * rate_of(FixedLength(0), 4)
    useless, first = World(planner(), **USELESS), 0
    for _ in range(100):
        useless.run(names(4, first), 6)
        first += 4
    assert useless.rate > 0.97 * rate_of(FixedLength(0), 4)


def test_planning_never_sees_a_token() -> None:
    """Losslessness rests on this: token ids cannot reach the planner."""
    for name, method in inspect.getmembers(Planner, inspect.isfunction):
        assert not {"tokens", "token_ids", "sampled", "bonus"} & set(
            inspect.signature(method).parameters
        ), name
