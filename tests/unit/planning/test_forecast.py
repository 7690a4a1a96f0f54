"""What drafting is expected to bring, against loops over the samples."""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_dflash.planning import Floats, Ints
from vllm_dflash.planning.forecast import (
    ASSUMED_RATES,
    ENOUGH_SAMPLES,
    MAX_SAMPLES,
    SAMPLES_PER_GROUP,
    Forecast,
    Summary,
)
from vllm_dflash.planning.thresholds import THRESHOLDS

WIDTH = 3


class Outcomes(NamedTuple):
    """Outcomes of drafting the best group of requests, the best two, and so on."""

    drafted: Ints
    min_scores: Floats
    kept: Floats
    gain: Floats


def outcomes_of(summary: Summary, scores: Floats) -> Outcomes:
    """Outcomes of requests with these scores."""
    best_first = zip([np.inf, *summary.min_scores[:-1]], summary.min_scores, strict=True)
    members = np.array(
        [((scores < above) & (scores >= least)).sum() for above, least in best_first]
    )
    kept, gain = (members[:, None, None] * one for one in (summary.kept, summary.gain))
    return Outcomes(members.cumsum(), summary.min_scores, kept.cumsum(axis=0), gain.cumsum(axis=0))


def new_forecast(max_draft: int) -> Forecast:
    return Forecast(max_draft, MAX_SAMPLES)


def observe(forecast: Forecast, scores: Floats, curves: Floats) -> None:
    """Observe drafts of requests that have these scores."""
    forecast._scores[: len(scores)] = scores
    forecast.observe(np.arange(len(scores)), curves)


def some_curves(count: int, seed: int = 0) -> np.ndarray:
    return np.cumprod(np.random.default_rng(seed).random((count, WIDTH)), axis=1)


@given(st.integers(ENOUGH_SAMPLES, 100), st.lists(st.floats(0, 1), min_size=1, max_size=9))
def test_outcomes_equal_loops_over_the_samples(count: int, asked: list[float]) -> None:
    forecast = new_forecast(WIDTH)
    curves = some_curves(count)
    scores = np.random.default_rng(1).permutation(count) / count  # all different
    observe(forecast, scores, curves)
    outcomes = outcomes_of(forecast.summary, np.array(asked))
    num_groups = min(max(count // SAMPLES_PER_GROUP, 1), 4)
    assert len(outcomes.drafted) == num_groups
    ranked = sorted(range(count), key=lambda sample: -scores[sample])
    bounds = [group * count // num_groups for group in range(num_groups + 1)]
    for group in range(num_groups):
        drafted, kept, gain = 0, np.zeros((12, WIDTH)), np.zeros((12, WIDTH))
        for better in range(group + 1):
            members = ranked[bounds[better] : bounds[better + 1]]
            lowest = outcomes.min_scores[better]
            highest = outcomes.min_scores[better - 1] if better else np.inf
            alike = sum(lowest <= score < highest for score in asked)
            drafted += alike
            for row, threshold in enumerate(THRESHOLDS):
                for width in range(WIDTH):
                    values = [curves[member, : width + 1] for member in members]
                    chosen = [value[value >= threshold] for value in values]
                    kept[row, width] += alike * np.mean([len(one) for one in chosen])
                    gain[row, width] += alike * np.mean([one.sum() for one in chosen])
        assert outcomes.drafted[group] == drafted
        assert outcomes.kept[group] == pytest.approx(kept)
        assert outcomes.gain[group] == pytest.approx(gain)
    assert outcomes.drafted[-1] == len(asked)  # the last group has all requests


def test_hope_lasts_until_enough_was_seen() -> None:
    forecast = new_forecast(WIDTH)
    hoped = outcomes_of(forecast.summary, np.array([0.5])).gain[0, 0, 0]
    assert hoped == pytest.approx(ASSUMED_RATES.mean())
    useless = np.zeros((ENOUGH_SAMPLES - 1, WIDTH))
    observe(forecast, np.zeros(len(useless)), useless)
    assert 0 < outcomes_of(forecast.summary, np.array([0.5])).gain[0, 0, 0] < hoped
    observe(forecast, np.zeros(1), useless[:1])
    assert outcomes_of(forecast.summary, np.array([0.5])).gain.max() == 0


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
    gain = outcomes_of(forecast.summary, np.array([2.0])).gain
    assert gain[0, 0, 0] == pytest.approx(13.0 / 20)


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
    asked = np.array([edge + side for edge in edges for side in (-0.01, 0.0, 0.01)])
    outcomes = outcomes_of(forecast.summary, asked)
    assert outcomes.min_scores.tolist() == [*edges, -np.inf]
    # A request at an edge, or above it, belongs to the better group.
    drafted = [sum(asked >= edge) for edge in edges]
    assert outcomes.drafted.tolist() == [*drafted, len(asked)]


def test_more_samples_than_there_is_room_for() -> None:
    forecast = new_forecast(WIDTH)
    for value in (0.2, 0.4, 0.6):
        observe(forecast, np.zeros(300), np.full((300, WIDTH), value))
    assert forecast.summary.mean_first_worth == pytest.approx((212 * 0.4 + 300 * 0.6) / MAX_SAMPLES)


def test_a_narrow_block_is_continued_as_it_falls() -> None:
    forecast = new_forecast(WIDTH)
    observe(forecast, np.zeros(20), np.full((20, 1), 0.5))
    gain = outcomes_of(forecast.summary, np.array([0.0])).gain[0, 0]
    assert gain == pytest.approx(np.cumsum([0.5, 0.25, 0.125]))
    forecast = new_forecast(4)
    observe(forecast, np.zeros(20), np.full((20, 2), [0.9, 0.25]))
    gain = outcomes_of(forecast.summary, np.array([0.0])).gain[0, 0]
    assert gain == pytest.approx(np.cumsum([0.9, 0.25, 0.125, 0.0625]))
    forecast = new_forecast(4)
    observe(forecast, np.zeros(20), np.zeros((20, 3)))
    assert not outcomes_of(forecast.summary, np.array([0.0])).gain.any()
