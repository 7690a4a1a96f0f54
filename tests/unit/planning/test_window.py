"""Draft windows, chosen by measured tokens per second."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_dflash.planning.window import (
    FIRST_STEPS,
    LEAST_CONTEXT,
    MEMORY,
    MOST_STEPS,
    PRIOR,
    PROBE_STEPS,
    TOKENS,
    TRIAL_STEPS,
    WHOLE,
    Chosen,
    ContextClass,
    Window,
    WindowChooser,
    described,
)


@given(
    st.lists(st.integers(0, 400), min_size=1, max_size=5),
    st.integers(0, 90),
    st.integers(0, 300),
    st.sampled_from([1, 16, 32]),
)
def test_what_is_left_out_against_one_request_at_a_time(
    lens: list[int], tokens: int, shortest: int, unit: int
) -> None:
    found = Window(tokens, shortest, 0).skipped(np.array(lens), unit)
    for context, skipped in zip(lens, found.tolist(), strict=True):
        attended = int(Window(tokens, shortest, 0).attended(np.array([context]))[0])
        assert attended == (tokens if 0 < tokens < context >= shortest else context)
        if not tokens or context < shortest or context <= tokens:
            assert skipped == 0
        else:  # as many blocks as leave the window's tokens
            assert skipped % unit == 0
            assert tokens <= context - skipped < tokens + unit


LARGE, SMALL = TOKENS


def run(
    chooser: WindowChooser,
    context: int,
    steps: int,
    *,
    accepted: tuple[float, ...],
    seconds: tuple[float, ...],
    seed: int = 0,
    requests: int = 4,
) -> list[int]:
    """Return the window's tokens in each step of an engine where blocks without a window, with the
    large one and with the small one have these means; the rest of a step takes 10 ms."""
    random, windows = np.random.default_rng(seed), []
    for _ in range(steps):
        window = chooser.choose(np.full(requests, context)).window
        way = chooser.tokens.index(window.tokens)
        came = int(random.binomial(7 * requests, accepted[way] / 7))
        chooser.observe_drafts(window, requests, came)
        took = seconds[way] * requests * random.normal(1.0, 0.05)
        chooser.observe_seconds(window, requests, took, 0.010 * requests)
        windows.append(window.tokens)
    return windows


@pytest.mark.parametrize(
    ("accepted", "seconds", "wanted"),
    [
        ((2.0, 2.0, 2.0), (0.010, 0.004, 0.005), LARGE),  # faster
        ((2.0, 2.0, 2.0), (0.004, 0.006, 0.005), 0),
        ((1.0, 1.5, 2.5), (0.005, 0.005, 0.005), SMALL),  # more accepted
        ((2.0, 1.5, 1.0), (0.006, 0.005, 0.004), 0),  # faster, but much is lost
    ],
)
def test_the_fastest_way_is_used_and_the_others_seldom_tried(
    accepted: tuple[float, ...], seconds: tuple[float, ...], wanted: int
) -> None:
    chooser = WindowChooser(8192)
    run(chooser, 5000, 1500, accepted=accepted, seconds=seconds)
    later = run(chooser, 5000, 8000, accepted=accepted, seconds=seconds, seed=1)
    assert later.count(wanted) > 0.95 * len(later)
    assert set(later) == {0, *TOKENS}


def test_what_has_changed_is_noticed() -> None:
    chooser, same = WindowChooser(8192), (2.0, 2.0, 2.0)
    run(chooser, 3000, 1000, accepted=same, seconds=(0.010, 0.010, 0.004))
    assert chooser.report()[0]["window"] == SMALL
    run(chooser, 3000, 8000, accepted=same, seconds=(0.004, 0.010, 0.010))
    assert chooser.report()[0]["window"] == 0


def test_few_steps_show_a_large_difference() -> None:
    """If drafting stops to pay without a window, few more steps are drafted."""
    chooser = WindowChooser(8192)
    few = TRIAL_STEPS * (1 + len(TOKENS))
    poor = partial(run, chooser, 3000, accepted=(0.1, 0.1, 2.0), seconds=(0.005,) * 3, requests=1)
    assert poor(few - 1) == ([LARGE, SMALL, 0] * few)[: few - 1]
    found = [chooser.choose(np.full(1, 3000)) for _ in range(2)]
    assert [one.window.tokens for one in found] == [SMALL, SMALL]
    assert [one.is_better for one in found] == [True, False]


def test_a_trial_or_probe_does_not_change_what_is_in_use() -> None:
    chooser, seen = WindowChooser(8192), []
    for _ in range(FIRST_STEPS + 3 * TRIAL_STEPS + 2):
        chosen = chooser.choose(np.full(1, 3000))
        seen.append((chosen.window.tokens, chosen.in_use.tokens))
    assert {in_use for _, in_use in seen} == {0}
    assert {tried for tried, _ in seen[: 3 * TRIAL_STEPS - 1]} == {0, *TOKENS}
    assert seen[-1][0] != 0


def test_longer_contexts_start_with_what_shorter_ones_use() -> None:
    """Drafting may have stopped by then, as it does not pay with the other ways."""
    chooser, poor = WindowChooser(8192), (0.1, 0.1, 2.0)
    run(chooser, 1500, 300, accepted=poor, seconds=(0.005,) * 3)
    windows = run(chooser, 6000, FIRST_STEPS + 1, accepted=poor, seconds=(0.005,) * 3)
    assert windows[:-2] == [SMALL] * (FIRST_STEPS - 1)
    assert windows[-1] != SMALL
    # Shorter ones than any that were seen have a trial of their own.
    chooser = WindowChooser(8192)
    run(chooser, 6000, 300, accepted=poor, seconds=(0.005,) * 3)
    few = run(chooser, 1500, 3, accepted=poor, seconds=(0.005,) * 3)
    assert few == [LARGE, SMALL, 0]


def test_only_what_was_just_tried_can_replace_what_is_in_use() -> None:
    """The third way was measured in a batch whose steps took less time for each request."""
    one = ContextClass(3)
    for way, seconds in enumerate((0.02, 0.03, 0.001)):
        one.ways[way].add_seconds(seconds)
    one._decide([1])
    assert one.in_use == 0
    one._decide(range(3))
    assert one.in_use == 2


def test_classes_are_apart_and_short_contexts_have_no_window() -> None:
    chooser = WindowChooser(100_000)
    assert len(chooser.classes) == 7  # 1,024 to 65,536 and more
    equal, slow = (2.0, 2.0, 2.0), (0.010, 0.002, 0.003)
    assert set(run(chooser, LEAST_CONTEXT - 1, 500, accepted=equal, seconds=slow)) == {0}
    assert chooser.report() == []
    run(chooser, 40_000, 500, accepted=equal, seconds=slow)
    run(chooser, 3000, 500, accepted=equal, seconds=(0.002, 0.003, 0.003))
    report = chooser.report()
    assert [(one["context"], one["window"]) for one in report] == [
        ([2048, 4096], 0),
        ([32768, 65536], LARGE),
    ]
    # By the mean of the batch.
    assert chooser.choose(np.array([100, 4600])).window.octave == 1
    assert chooser.choose(np.array([100, 100])) == Chosen(WHOLE, WHOLE)
    assert chooser.choose(np.array([900_000])).window.octave == 6


def test_intervals_between_probes_double_up_to_the_limit() -> None:
    one, ways = ContextClass(3), []
    for _ in range(60_000):
        ways.append(one.choose_way(1))
    ways = ways[3 * TRIAL_STEPS - 1 :]
    edges = np.flatnonzero(np.diff(ways))
    assert (np.diff(edges)[::2] == PROBE_STEPS).all()
    intervals = np.diff(edges)[1::2]
    assert edges[0] + 1 == FIRST_STEPS
    assert intervals.tolist()[:2] == [2 * FIRST_STEPS, 4 * FIRST_STEPS]
    assert intervals.max() == MOST_STEPS
    probed = [ways[edge + 1] for edge in edges[::2]]
    assert probed[:6] == [1, 2, 1, 2, 1, 2] or probed[:6] == [2, 1, 2, 1, 2, 1]


def test_steps_between_two_plans_count() -> None:
    one = ContextClass(2)
    assert [one.choose_way(TRIAL_STEPS) for _ in range(2)] == [1, 0]
    assert one.choose_way(FIRST_STEPS) == 1
    assert [one.choose_way(PROBE_STEPS // 4) for _ in range(4)] == [1, 1, 1, 0]


samples = st.lists(
    st.tuples(st.booleans(), st.integers(1, 20), st.integers(0, 7), st.floats(1e-4, 1e-2)),
    min_size=1,
    max_size=9,
)


@given(samples)
def test_rates_against_plain_means(seen: list[tuple[bool, int, int, float]]) -> None:
    """As long as there are few steps, all count alike, but for surprises."""
    chooser = WindowChooser(4096)
    for has_window, blocks, accepted, seconds in seen:
        window = Window(has_window * LARGE, LEAST_CONTEXT, 0)
        chooser.observe_drafts(window, blocks, accepted)
        chooser.observe_seconds(window, 2, 2 * seconds, 0.02)
    mean = sum(one[2] for one in seen) / sum(one[1] for one in seen)
    found = chooser.classes[0].rates()
    assert found[2] == 0.0
    for way, rate in enumerate(found[:2]):
        mine = [one for one in seen if one[0] == way]
        if not mine:
            assert rate == 0.0
            continue
        took = mine[0][3]
        for number, one in enumerate(mine[1:], 2):
            took += (min(one[3], 3 * took) - took) / number
        came, blocks = sum(one[2] for one in mine), sum(one[1] for one in mine)
        expected = (1 + (came + PRIOR * mean) / (blocks + PRIOR)) / (0.01 + took)
        assert rate == pytest.approx(expected)


@given(st.integers(1, 50), st.floats(0.0, 7.0))
def test_old_blocks_are_forgotten(thousands: int, mean: float) -> None:
    chooser = WindowChooser(4096)
    window = Window(0, LEAST_CONTEXT, 0)
    for _ in range(thousands):
        chooser.observe_drafts(window, 1000, int(1000 * mean))
    way = chooser.classes[0].ways[0]
    assert way.verified <= MEMORY
    assert way.acceptance == pytest.approx(int(1000 * mean) / 1000)


def test_a_line_for_the_log() -> None:
    chooser = WindowChooser(4096)
    run(chooser, 3000, 1000, accepted=(2.0, 2.0, 2.0), seconds=(0.010, 0.002, 0.004))
    line = described(chooser.report())
    assert line.startswith("2048 to 4095 tokens: 1024 (all: ")
    assert " ms, " in line
    assert "; 1024: " in line
    assert "; 256: " in line
    run(chooser, 9000, 1, accepted=(2.0, 2.0, 2.0), seconds=(0.010, 0.002, 0.004))
    assert "4096 and more tokens: " in described(chooser.report())
