"""What drafting is expected to bring, against loops over the samples."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_dflash.planning import Floats
from vllm_dflash.planning.forecast import (
    ASSUMED_RATES,
    ENOUGH_SAMPLES,
    MAX_SAMPLES,
    SAMPLES_PER_GROUP,
    Forecast,
    group_of,
)
from vllm_dflash.planning.thresholds import THRESHOLDS

WIDTH = 3


def new_forecast(max_draft: int) -> Forecast:
    return Forecast(max_draft, MAX_SAMPLES)


def observe(forecast: Forecast, scores: Floats, curves: Floats) -> None:
    """Observe drafts of requests that have these scores."""
    forecast._scores[: len(scores)] = scores
    forecast.observe(np.arange(len(scores)), curves)


def some_curves(count: int, seed: int = 0) -> np.ndarray:
    return np.cumprod(np.random.default_rng(seed).random((count, WIDTH)), axis=1)


@given(st.integers(ENOUGH_SAMPLES, 100), st.lists(st.floats(0, 1), min_size=1, max_size=9))
def test_the_summary_equals_loops_over_the_samples(count: int, asked: list[float]) -> None:
    forecast = new_forecast(WIDTH)
    curves = some_curves(count)
    scores = np.random.default_rng(1).permutation(count) / count  # all different
    observe(forecast, scores, curves)
    summary = forecast.summary
    num_groups = min(max(count // SAMPLES_PER_GROUP, 1), 4)
    assert len(summary.min_scores) == num_groups
    ranked = sorted(range(count), key=lambda sample: -scores[sample])
    bounds = [group * count // num_groups for group in range(num_groups + 1)]
    for group in range(num_groups):
        members = ranked[bounds[group] : bounds[group + 1]]
        for row, threshold in enumerate(THRESHOLDS):
            for width in range(WIDTH):
                values = [curves[member, : width + 1] for member in members]
                chosen = [value[value >= threshold] for value in values]
                kept, gain = ([len(one) for one in chosen], [one.sum() for one in chosen])
                assert summary.kept[group, row, width] == pytest.approx(np.mean(kept))
                assert summary.gain[group, row, width] == pytest.approx(np.mean(gain))
    for score in asked:  # the last group has all others
        groups = [group for group, least in enumerate(summary.min_scores) if score >= least]
        assert group_of(summary, score) == groups[0]


def test_hope_lasts_until_enough_was_seen() -> None:
    forecast = new_forecast(WIDTH)
    hoped = forecast.summary.gain[0, 0, 0]
    assert hoped == pytest.approx(ASSUMED_RATES.mean())
    useless = np.zeros((ENOUGH_SAMPLES - 1, WIDTH))
    observe(forecast, np.zeros(len(useless)), useless)
    assert 0 < forecast.summary.gain[0, 0, 0] < hoped
    observe(forecast, np.zeros(1), useless[:1])
    assert forecast.summary.gain.max() == 0


@pytest.mark.parametrize(("steps_between", "old"), [(62, 20), (63, 0)])
def test_samples_count_for_64_steps(steps_between: int, old: int) -> None:
    forecast = new_forecast(WIDTH)
    observe(forecast, np.zeros(20), np.ones((20, WIDTH)))
    for _ in range(steps_between):
        observe(forecast, np.zeros(1), np.zeros((1, WIDTH)))
    observe(forecast, np.zeros(40), np.full((40, WIDTH), 0.5))
    counted = old + steps_between + 40
    assert forecast.summary.mean_first_worth == pytest.approx((old + 40 * 0.5) / counted)


def test_many_samples_are_read_when_an_eighth_of_them_is_new() -> None:
    """Up to 32 samples are read immediately."""
    forecast = new_forecast(WIDTH)
    means = []
    for count, value in ((31, 0.0), (1, 1.0), (3, 1.0), (1, 1.0), (4, 1.0), (1, 1.0)):
        observe(forecast, np.zeros(count), np.full((count, WIDTH), value))
        means.append(forecast.summary.mean_first_worth)
    # An eighth of 32 samples is 4; an eighth of the 36 that are then read is 5.
    assert means == pytest.approx([0, 1 / 32, 1 / 32, 5 / 36, 5 / 36, 10 / 41])


def test_of_requests_that_score_alike_the_first_samples_come_first() -> None:
    """Scores are 2, 1 and 0 in turn. The better half has all 14 twos and the first 6 ones."""
    forecast = new_forecast(1)
    observe(forecast, 2.0 - np.arange(40) % 3, np.repeat([[1.0], [0.0]], 20, axis=0))
    # The first 20 samples were accepted: 7 of the twos, and all 6 of those ones.
    assert forecast.summary.gain[0, 0, 0] == pytest.approx(13.0 / 20)


@pytest.mark.parametrize(
    ("count", "edges"),
    [
        (31, []),
        (32, [15.5]),
        (48, [31.5, 15.5]),
        (64, [47.5, 31.5, 15.5]),
        (200, [149.5, 99.5, 49.5]),
    ],
)
def test_groups_begin_half_way_between_two_scores(count: int, edges: list[float]) -> None:
    forecast = new_forecast(1)
    observe(forecast, np.arange(float(count)), np.ones((count, 1)))
    assert forecast.summary.min_scores.tolist() == [*edges, -np.inf]
    # A request at an edge, or above it, belongs to the better group.
    for group, edge in enumerate(edges):
        found = [group_of(forecast.summary, edge + side) for side in (-0.01, 0.0, 0.01)]
        assert found == [group + 1, group, group]


def test_more_samples_than_there_is_room_for() -> None:
    forecast = new_forecast(WIDTH)
    for value in (0.2, 0.4, 0.6):
        observe(forecast, np.zeros(300), np.full((300, WIDTH), value))
    assert forecast.summary.mean_first_worth == pytest.approx((212 * 0.4 + 300 * 0.6) / MAX_SAMPLES)


def test_a_narrow_block_is_continued_as_it_falls() -> None:
    forecast = new_forecast(WIDTH)
    observe(forecast, np.zeros(20), np.full((20, 1), 0.5))
    gain = forecast.summary.gain[0, 0]
    assert gain == pytest.approx(np.cumsum([0.5, 0.25, 0.125]))
    forecast = new_forecast(4)
    observe(forecast, np.zeros(20), np.full((20, 2), [0.9, 0.25]))
    gain = forecast.summary.gain[0, 0]
    assert gain == pytest.approx(np.cumsum([0.9, 0.25, 0.125, 0.0625]))
    forecast = new_forecast(4)
    observe(forecast, np.zeros(20), np.zeros((20, 3)))
    assert not forecast.summary.gain.any()
