"""What drafting is expected to bring, against loops over the samples."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_dflash.planning.forecast import (
    ASSUMED_RATES,
    ENOUGH_SAMPLES,
    MAX_SAMPLES,
    SAMPLE_LIFE,
    SAMPLES_PER_GROUP,
    THRESHOLDS,
    Forecast,
)

WIDTH = 3


def some_curves(count: int, seed: int = 0) -> np.ndarray:
    return np.cumprod(np.random.default_rng(seed).random((count, WIDTH)), axis=1)


@given(st.integers(ENOUGH_SAMPLES, 100), st.lists(st.floats(0, 1), min_size=1, max_size=9))
def test_outcomes_equal_loops_over_the_samples(count: int, asked: list[float]) -> None:
    forecast = Forecast(WIDTH)
    curves = some_curves(count)
    scores = np.random.default_rng(1).permutation(count) / count  # all different
    forecast.observe(scores, curves)
    outcomes = forecast.outcomes(np.array(asked))
    num_groups = min(max(count // SAMPLES_PER_GROUP, 1), 4)
    assert len(outcomes.drafted) == num_groups
    ranked = sorted(range(count), key=lambda sample: -scores[sample])
    bounds = [group * count // num_groups for group in range(num_groups + 1)]
    for group in range(num_groups):
        drafted, kept, gain = 0, np.zeros((12, WIDTH)), np.zeros((12, WIDTH))
        for better in range(group + 1):
            members = ranked[bounds[better] : bounds[better + 1]]
            lowest = outcomes.least_score[better]
            highest = outcomes.least_score[better - 1] if better else np.inf
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
    assert outcomes.drafted[-1] == len(asked)  # the last group is everybody


def test_hope_lasts_until_enough_was_seen() -> None:
    forecast = Forecast(WIDTH)
    hoped = forecast.outcomes(np.array([0.5])).gain[0, 0, 0]
    assert hoped == pytest.approx(ASSUMED_RATES.mean())
    useless = np.zeros((ENOUGH_SAMPLES - 1, WIDTH))
    forecast.observe(np.zeros(len(useless)), useless)
    assert 0 < forecast.outcomes(np.array([0.5])).gain[0, 0, 0] < hoped
    forecast.observe(np.zeros(1), useless[:1])
    assert forecast.outcomes(np.array([0.5])).gain.max() == 0


def test_old_samples_are_forgotten() -> None:
    forecast = Forecast(WIDTH)
    forecast.observe(np.zeros(32), np.ones((32, WIDTH)))
    for _ in range(SAMPLE_LIFE + 8):
        forecast.observe(np.zeros(1), np.full((1, WIDTH), 0.1))
    assert forecast.mean_first_survival == pytest.approx(0.1)


def test_more_samples_than_there_is_room_for() -> None:
    forecast = Forecast(WIDTH)
    for value in (0.2, 0.4, 0.6):
        forecast.observe(np.zeros(300), np.full((300, WIDTH), value))
    assert forecast.mean_first_survival == pytest.approx((212 * 0.4 + 300 * 0.6) / MAX_SAMPLES)


def test_a_narrow_block_is_continued_as_it_falls() -> None:
    forecast = Forecast(WIDTH)
    forecast.observe(np.zeros(20), np.full((20, 1), 0.5))
    gain = forecast.outcomes(np.array([0.0])).gain[0, 0]
    assert gain == pytest.approx(np.cumsum([0.5, 0.25, 0.125]))
