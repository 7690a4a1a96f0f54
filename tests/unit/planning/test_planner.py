"""V1's planner in a simulated engine, beside the best fixed lengths, and no drafts at all."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from itertools import chain, count, islice
from typing import Any

import numpy as np
import pytest

from support.cost_table import CostTable
from support.simulated_host import SimulatedHost, Static, Written, made_up
from vllm_dflash.planning.planner import Planner

CPU = CostTable.read("cpu_2_cores")
BAD, GOOD = 0.03, 0.95
Streams = list[Iterator[Written]]


def alike(num: int, rate: float, **request: Any) -> Streams:
    return [made_up(rate, seed=slot, **request) for slot in range(num)]


def run(
    streams: Streams,
    policy: Static | None = None,
    *,
    warm: int = 100,
    steps: int = 300,
    **more: Any,
) -> SimulatedHost:
    """Return an engine after this many steps, whose counts then start from 0."""
    made = SimulatedHost(streams, CPU, policy, **{"looks_up": False, **more})
    for number in (warm, steps):
        count_anew(made)
        if number:
            made.run(steps=number)
    return made


def count_anew(made: SimulatedHost) -> None:
    made.tokens[:] = made.drafted[:] = 0
    made.clock.now = 0.0


def rate_of(made: SimulatedHost) -> float:
    return float(made.tokens.sum() / made.clock.now)


def mean_speed(made: SimulatedHost) -> float:
    """Return what proportional fairness is about: the geometric mean of the requests' speeds."""
    return float(np.exp(np.log(made.tokens / made.clock.now).mean()))


def streams_of(rates: Sequence[float], first: int = 0) -> Streams:
    """Return one request for each slot, with these rates; `first`: the first one's seed."""
    return [made_up(rate, length=4000, seed=first + slot) for slot, rate in enumerate(rates)]


LASTING: dict[str, Any] = {"longest": 4096}


@pytest.mark.parametrize(("num", "share"), [(1, 0.97), (8, 0.94), (32, 0.9)])
def test_as_fast_as_plain_and_any_fixed_length(num: int, share: float) -> None:
    """While it still finds out what drafts are worth, and that for 32 they are not."""
    best = max(rate_of(run(alike(num, 0.8), Static(length))) for length in (0, 4, 7))
    assert rate_of(run(alike(num, 0.8))) > share * best


@pytest.mark.parametrize(("num", "share"), [(1, 0.955), (8, 0.975), (32, 0.96)])
def test_useless_drafts_cost_little(num: int, share: float) -> None:
    """The drafter is as sure of them as of good ones."""
    ours, plain = (run(alike(num, 0.02, overrated=0.1), each) for each in (None, Static(0)))
    assert rate_of(ours) > share * rate_of(plain)


@pytest.mark.parametrize("num", [1, 8])
def test_drafts_whose_rows_seem_free_are_not_charged_to_plain_decoding(num: int) -> None:
    """If every step verifies drafts, only a check shows that plain decoding is faster."""

    def blind(width: int, num_requests: int, costs: Any, **more: Any) -> Planner:
        costs.verify = type(costs.verify)(np.array([1, 1000]), costs.verify.at([num, num]))
        return Planner(width, num_requests, costs, **more)

    ours = run(alike(num, 0.3), make_planner=blind, warm=200)
    assert rate_of(ours) > 0.95 * rate_of(run(alike(num, 0.3), Static(0)))


@pytest.mark.parametrize("overrated", [0.4, 2.5])
def test_a_drafter_that_misjudges_itself(overrated: float) -> None:
    """Its confidence is corrected, so it costs little if it is too high or too low."""
    honest = rate_of(run(alike(4, 0.8)))
    assert rate_of(run(alike(4, 0.8, overrated=overrated))) > 0.95 * honest


STATIC = {"all": (7,), "good, 7": (7,) * 4 + (0,) * 4, "good, 4": (4,) * 4 + (0,) * 4}
"""Fixed lengths of four good and four bad requests."""


def test_of_four_good_and_four_bad_requests_the_good_ones_are_drafted() -> None:
    """As fast as if it had been known which they are, on the average of three batches. Their mean
    speed is geometric: what keeps the bad ones waiting must bring much."""
    rates, world = [GOOD] * 4 + [BAD] * 4, {"warm": 200, **LASTING}
    found, best = 0.0, 0.0
    for first in (0, 50, 100):
        ours = run(streams_of(rates, first), **world)
        each = [run(streams_of(rates, first), Static(*one), **world) for one in STATIC.values()]
        found, best = found + mean_speed(ours), best + max(map(mean_speed, each))
        assert ours.drafted[:4].sum() > 0.7 * 1200
        assert ours.drafted[4:].max() < 15
    assert found > 0.95 * best


def test_good_newcomers_beside_a_bad_long_request_are_drafted() -> None:
    """As was reported: they were not, since what was known of the long one was expected of them."""

    def streams() -> Streams:
        bad = made_up(BAD, length=2500, seed=0)
        return [bad, made_up(GOOD, length=150, prompt=200, seed=1)]

    ours = run(streams(), warm=400, steps=600, **LASTING)
    best = run(streams(), Static(0, 7), warm=400, steps=600, **LASTING)
    assert ours.drafted[1] > 0.95 * best.drafted[1]
    assert rate_of(ours) > 0.95 * rate_of(best)


def test_probes_become_rare_but_never_cease() -> None:
    made = run(alike(2, 0.02, length=2500, overrated=0.1), warm=1, steps=0, longest=2560)
    drafted = []
    for _ in range(20):
        made.drafted[:] = 0
        made.run(steps=100)
        drafted.append(int(made.drafted.sum()))
    assert 0 < sum(drafted[10:]) < sum(drafted[:10]) < 60
    assert min(a + b for a, b in zip(drafted[::2], drafted[1::2], strict=True)) > 0


def at_another_load(made: SimulatedHost, num: int) -> SimulatedHost:
    """Return an engine with the same planner that has other requests, so many of them."""

    def same(*_: Any, **__: Any) -> Any:
        return made.host.planner

    other = SimulatedHost(alike(num, 0.9), CPU, looks_up=False, make_planner=same)
    other._numbers = count(1_000_000)
    return other


@pytest.mark.parametrize(("before", "after"), [(32, 1), (1, 32), (1, 8), (16, 2)])
def test_what_other_batches_took_misleads_for_a_few_steps_only(before: int, after: int) -> None:
    """Steps of a size without drafts are unknown when it first occurs."""

    def many(width: int, _: int, costs: Any, **more: Any) -> Planner:
        return Planner(width, 64, CPU.costs(64), **more)

    made = run(alike(before, 0.9), make_planner=many, warm=150, steps=0)
    other = at_another_load(made, after)
    other.run(steps=40)
    count_anew(other)
    other.run(steps=160)
    assert rate_of(other) > 0.95 * rate_of(run(alike(after, 0.9), steps=160))


def test_drafting_follows_the_text() -> None:
    """Easy, useless, easy again. Drafting goes on, stops within dozens of steps, and goes on again
    after a probe."""

    of = [(0.9, 6, 1.0), (0.02, 2, 0.1), (0.9, 20, 1.0)]  # requests of 200 tokens each
    request = chain.from_iterable(
        islice(made_up(rate, seed=1, overrated=how), number) for rate, number, how in of
    )
    made, shares = run([request], warm=0, steps=0), []
    for start, end in ((600, 1200), (1400, 1600), (3000, 4000)):
        while made.tokens[0] < start:
            made.run(steps=1)
        drafted, steps = made.drafted[0], made.steps
        while made.tokens[0] < end:
            made.run(steps=1)
        shares.append(float((made.drafted[0] - drafted) / (made.steps - steps)))
    easy, useless, again = shares
    assert easy > 0.9
    assert useless < 0.3
    assert again > 0.9


def test_new_requests_start_from_what_others_have_shown() -> None:
    """A stream of requests of a few steps each does nearly as well as long ones."""
    short: dict[str, Any] = {"length": 16, "prompt": 20}
    ours, plain = (run(alike(8, 0.9, **short), each) for each in (None, Static(0)))
    assert rate_of(ours) > 1.15 * rate_of(plain)
    useless: dict[str, Any] = {"overrated": 0.1, **short}
    ours, plain = (run(alike(8, 0.02, **useless), each) for each in (None, Static(0)))
    assert rate_of(ours) > 0.97 * rate_of(plain)


def test_planning_never_sees_a_token() -> None:
    """Losslessness rests on this: token ids cannot reach the planner."""
    for name, method in inspect.getmembers(Planner, inspect.isfunction):
        assert not {"tokens", "token_ids", "sampled", "bonus"} & set(
            inspect.signature(method).parameters
        ), name
