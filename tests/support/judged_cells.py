"""Worlds to judge the planner in, on both runners, each with fixed lengths to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np

from support.ahead_scheduler import Fixed
from support.cost_table import CostTable
from support.judge import REGIMES, ours, rate_of
from support.recorded_drafts import RecordedDrafts, recorded_drafts
from support.simulated_host import SimulatedHost, Static, Written, made_up, recorded
from support.simulated_pipeline import Pipeline
from vllm_dflash.planning.costs import Attention, Curve

GPU, CPU = CostTable.read("assumed_gpu"), CostTable.read("cpu_2_cores")
SMALL_MODEL = CostTable(
    "a small model on a large GPU",
    verify=Curve(np.array([1, 8, 64, 256, 1024]), np.array([1.0, 1.0, 1.1, 1.5, 4.0]) / 1000),
    draft=Curve(np.array([8, 64, 256, 2048]), np.array([0.3, 0.4, 0.6, 1.8]) / 1000),
    context=Curve(np.array([1, 256]), np.zeros(2)),
)
KINDS = ("greedy", "drawn", "copies")
BAD, GOOD = 0.03, 0.95
"""Rates of acceptance of made-up requests."""
Lengths = Sequence[int | Sequence[int]]
"""Fixed lengths of all requests, or of each slot, to compare with."""


class JudgedCell(NamedTuple):
    """A world to plan in: ours, or a fixed policy, gets its tokens per second. Those of a mixed
    batch are R times the geometric mean of its requests', which is what we plan for."""

    name: str
    rate: Callable[[int, int | Sequence[int] | None], float]
    """From a seed, and the fixed lengths; None: ours."""
    fixed: Lengths
    """Lengths, one of which is the best fixed one."""
    is_mixed: bool = False
    """Whether requests stay different for long."""


def cells() -> list[JudgedCell]:
    """Return all cells of the judge."""
    return [*_v1_cells(), *_v2_cells()]


def _v2(
    name: str,
    drafts: RecordedDrafts,
    count: int,
    regime: str,
    fixed: Lengths = (0, 3, 7),
    *,
    table: CostTable = GPU,
    least: int = 4000,
    then: tuple[RecordedDrafts, ...] = (),
    is_mixed: bool = False,
    looks_up: bool = False,
    scale: float = 1.0,
    **world: Any,
) -> JudgedCell:
    allowed = REGIMES[regime]

    def rate(seed: int, length: int | Sequence[int] | None) -> float:
        if length is None:
            made = ours(
                drafts,
                count,
                table,
                allowed,
                looks_up=looks_up,
                scale=scale,
                seed=seed,
                **world,
            )
        else:
            both = {**allowed.world(), **world}
            made = Pipeline(Fixed(length), drafts, count, table, seed=seed, **both)
        if not then:
            rate = rate_of(made, least)
            return _mean_speed(made, tokens=max(least, 400 * count)) if is_mixed else rate
        started = made.clock.now
        for each in (drafts, *then):
            made.device.drafts = each
            made.run(tokens=max(least // 2, 200 * count))
        return float(made.tokens.sum()) / (made.clock.now - started)

    return JudgedCell(f"V2 {regime}: {name}, {count}", rate, fixed, is_mixed)


def _v2_cells() -> list[JudgedCell]:
    every = recorded_drafts()
    greedy, drawn, _ = every
    useless, found = greedy.with_useless_blocks(), []
    both = greedy.joined(useless)
    number = len(greedy.prompt_lengths)
    good, bad = np.arange(number), number + np.arange(number)
    for regime in REGIMES:
        for kind, drafts in zip(KINDS, every, strict=True):
            found += [
                _v2(f"{kind} + texts", drafts, count, regime, looks_up=True)
                for count in (1, 8, 32, 128)
            ]
        found += [_v2("greedy", greedy, count, regime) for count in (1, 32, 128)]
        found += [_v2("useless", useless, count, regime, (0,)) for count in (1, 16, 256)]
        found += [
            _v2("good, useless, good", greedy, count, regime, then=(useless, greedy))
            for count in (1, 8, 64)
        ]
        found += [
            _v2("useless, good, useless", useless, count, regime, then=(greedy, useless))
            for count in (1, 8, 64)
        ]
        found += [
            _v2(f"profile x {scale}", greedy, count, regime, scale=scale)
            for scale in (0.6, 1.6)
            for count in (1, 64)
        ]
        host: dict[str, Any] = {"table": SMALL_MODEL, "host_ms": 2.6}
        found += [_v2("host limit", drawn, count, regime, (0, 7), **host) for count in (1, 8, 32)]
        attention = Attention(plain=1e-8, draft=1e-8, block=2e-9)
        contexts = np.array([1, 2, 4, 8, 16, 30, 60, 60]) * 1000
        far: dict[str, Any] = {"attention": attention, "more_context": contexts}
        found.append(_v2("contexts of 1k to 60k", greedy, 8, regime, **far))
        mixed: dict[str, Any] = {"is_mixed": True}
        found += [
            _v2(
                "one good, one bad",
                both,
                2,
                regime,
                (0, 7, (7, 0)),
                pools=(good, bad),
                lasting=(0, 1),
                **mixed,
            ),
            _v2(
                "sixteen good, sixteen bad",
                both,
                32,
                regime,
                (0, 7, (7,) * 16 + (0,) * 16),
                pools=(good,) * 16 + (bad,) * 16,
                lasting=tuple(range(32)),
                **mixed,
            ),
            _v2(
                "good newcomers beside a bad one",
                both,
                2,
                regime,
                (0, 7, (7, 0)),
                pools=(good, bad),
                lasting=(1,),
                **mixed,
            ),
        ]
    return found


def _v1(
    name: str,
    streams: Callable[[int], list[Iterator[Written]]],
    fixed: Lengths = (0, 2, 4, 7),
    *,
    steps: int = 500,
    warm: int = 200,
    seconds: float = 0.0,
    is_mixed: bool = False,
    **world: Any,
) -> JudgedCell:
    def rate(seed: int, length: int | Sequence[int] | None) -> float:
        policy = None
        if length is not None:
            policy = Static(length) if isinstance(length, int) else Static(*length)
        made = SimulatedHost(streams(seed), CPU, policy, seed=seed, **world)
        if seconds:
            return made.run(seconds=seconds)
        if warm:
            made.run(steps=warm)
        return _mean_speed(made, steps=steps) if is_mixed else made.run(steps=steps)

    return JudgedCell(f"V1: {name}", rate, fixed, is_mixed)


def _rates(*rates: float, **request: Any) -> Callable[[int], list[Iterator[Written]]]:
    return lambda seed: [
        made_up(rate, seed=1000 * seed + slot, **request) for slot, rate in enumerate(rates)
    ]


def _v1_cells() -> list[JudgedCell]:
    found = []
    for number, kind in enumerate(KINDS):
        for count in (1, 4, 8, 32):

            def of_kind(seed: int, number: int = number, count: int = count) -> Any:
                return [recorded(number, 1000 * seed + slot) for slot in range(count)]

            found.append(_v1(f"{kind} + texts, {count}", of_kind))
            if not number:
                found.append(_v1(f"{kind}, {count}", of_kind, looks_up=False))
            for limit in (8, 30) if number == 1 and count >= 8 else ():
                start: dict[str, Any] = {"seconds": float(limit)}
                found.append(_v1(f"{kind}, first {limit} s, {count}", of_kind, (0,), **start))
            for scale in (0.6, 1.6) if not number and count != 4 else ():
                found.append(_v1(f"profile x {scale}, {count}", of_kind, scale=scale))
    long: dict[str, Any] = {"length": 20_000}
    mixed: dict[str, Any] = {"is_mixed": True, "longest": 20_480}
    found += [
        _v1("one good, one bad", _rates(GOOD, BAD, **long), (0, 7, 4, (7, 0)), **mixed),
        _v1(
            "four good, four bad",
            _rates(*[GOOD] * 4, *[BAD] * 4, **long),
            (0, 7, 4, (7,) * 4 + (0,) * 4, (4,) * 4 + (0,) * 4),
            **mixed,
        ),
        _v1(
            "sixteen from bad to good",
            _rates(*np.linspace(0.1, 0.95, 16).tolist(), length=2000),
            (
                0,
                7,
                4,
                (0,) * 8 + (2,) * 4 + (7,) * 4,
                (0,) * 8 + (7,) * 8,
                (0,) * 12 + (7,) * 4,
            ),
            **mixed,
        ),
    ]

    def newcomers(seed: int) -> list[Iterator[Written]]:
        bad = made_up(BAD, length=20_000, seed=seed)
        return [bad, made_up(GOOD, length=150, prompt=200, seed=100 + seed)]

    name, fixed = "good newcomers beside a bad one", (0, 7, (0, 7))
    found.append(_v1(name, newcomers, fixed, warm=1500, steps=2500, **mixed))
    useless: dict[str, Any] = {"overrated": 0.1}
    for count in (1, 8, 32):
        found.append(_v1(f"useless, {count}", _rates(*[0.02] * count, **useless), (0,)))
        found.append(_v1(f"alike at 0.8, {count}", _rates(*[0.8] * count)))
        turns = [0.9, 0.02, 0.9]
        found.append(_v1(f"good, useless, good, {count}", _turning(count, turns), warm=0))
        turns = [0.02, 0.9, 0.02]
        found.append(_v1(f"useless, good, useless, {count}", _turning(count, turns), warm=0))
    short: dict[str, Any] = {"length": 16, "prompt": 20}
    found.append(_v1("short requests, useless, 8", _rates(*[0.02] * 8, **short, **useless), (0,)))
    found.append(_v1("short requests, good, 8", _rates(*[0.9] * 8, **short)))

    def far(seed: int) -> list[Iterator[Written]]:
        prompts = (1000, 4000, 16_000, 60_000)
        return [
            made_up(0.9, length=600, prompt=prompt, seed=10 * seed + slot)
            for slot, prompt in enumerate(prompts)
        ]

    attention = Attention(plain=1e-6, draft=1e-6, block=3e-7)
    world: dict[str, Any] = {"attention": attention, "longest": 65_536, "steps": 200, "warm": 20}
    found.append(_v1("contexts of 1k to 60k", far, (0, 7, (7, 7, 0, 0), (7, 7, 7, 0)), **world))
    return found


def _mean_speed(made: SimulatedHost | Pipeline, **stretch: int) -> float:
    """Run for a stretch; return R times the geometric mean of the slots' tokens per second."""
    before, started = made.tokens.copy(), made.clock.now
    made.run(**stretch)
    each = (made.tokens - before) / (made.clock.now - started)
    return float(len(each) * np.exp(np.log(each).mean()))


def _turning(count: int, rates: Sequence[float]) -> Callable[[int], list[Iterator[Written]]]:
    """Return streams whose requests have these rates, 1,000 tokens each, one after the other."""

    def streams(seed: int) -> list[Iterator[Written]]:
        return [
            chain.from_iterable(
                islice(made_up(rate, length=250, seed=100 * seed + slot, overrated=0.5), 4)
                for rate in (*rates, *rates, *rates)
            )
            for slot in range(count)
        ]

    return streams
