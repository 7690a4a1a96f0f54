"""Acceptance estimates, against plain bookkeeping and against known truths."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_dflash.planning.survival import (
    CONFIDENCE_KNOTS,
    HALF_LIFE_TOKENS,
    POSITION_PRIOR_TOKENS,
    PRIOR_TOKENS,
    Bias,
    Calibration,
    survival_curves,
)

WIDTH = 3
blocks = st.lists(
    st.tuples(
        st.lists(st.floats(0, 1), min_size=WIDTH, max_size=WIDTH),
        st.integers(1, WIDTH),
        st.integers(0, WIDTH),
    ),
    min_size=1,
    max_size=5,
)


@given(st.lists(blocks, min_size=1, max_size=3))
def test_calibration_equals_plain_bookkeeping(batches: list) -> None:
    """One dictionary per table, one draft at a time."""
    calibration = Calibration(WIDTH)
    seen: dict[tuple[int, int], float] = {}
    accepted: dict[tuple[int, int], float] = {}
    for batch in batches:
        confidence = np.array([block[0] for block in batch])
        drafted = np.array([block[1] for block in batch])
        good = np.array([min(block[1], block[2]) for block in batch])
        calibration.observe(confidence, drafted, good)
        tried = [min(g + 1, d) for g, d in zip(good, drafted, strict=True)]
        fade = 0.5 ** (sum(tried) / HALF_LIFE_TOKENS)
        for table in (seen, accepted):
            for cell in table:
                table[cell] *= fade
        for row, count in enumerate(tried):
            for position in range(count):
                value = confidence[row, position]
                knot = max(i for i, k in enumerate(CONFIDENCE_KNOTS[:-1]) if k <= value or i == 0)
                width = CONFIDENCE_KNOTS[knot + 1] - CONFIDENCE_KNOTS[knot]
                upper = (value - CONFIDENCE_KNOTS[knot]) / width
                for cell, share in (((position, knot), 1 - upper), ((position, knot + 1), upper)):
                    seen[cell] = seen.get(cell, 0.0) + share
                    accepted[cell] = accepted.get(cell, 0.0) + share * (position < good[row])
    for position in range(WIDTH):
        for knot, own_word in enumerate(CONFIDENCE_KNOTS):
            everywhere = [
                sum(table.get((p, knot), 0.0) for p in range(WIDTH)) for table in (accepted, seen)
            ]
            pooled = (everywhere[0] + PRIOR_TOKENS * own_word) / (everywhere[1] + PRIOR_TOKENS)
            expected = accepted.get((position, knot), 0.0) + POSITION_PRIOR_TOKENS * pooled
            expected /= seen.get((position, knot), 0.0) + POSITION_PRIOR_TOKENS
            assert calibration.rates[position, knot] == pytest.approx(expected)


def test_before_anything_was_seen_the_drafter_is_believed() -> None:
    confidence = np.array([[0.2, 0.55, 1.0]])
    assert Calibration(WIDTH).acceptance(confidence) == pytest.approx(confidence)


def test_an_overconfident_drafter_is_found_out() -> None:
    rng = np.random.default_rng(0)
    calibration = Calibration(WIDTH)
    for _ in range(300):
        confidence = rng.uniform(0.3, 1.0, (8, WIDTH))
        lucky = rng.random((8, WIDTH)) < confidence**3
        calibration.observe(confidence, np.full(8, WIDTH), np.cumprod(lucky, axis=1).sum(axis=1))
    asked = np.array([[0.4] * WIDTH, [0.7] * WIDTH, [0.95] * WIDTH])
    assert calibration.acceptance(asked) == pytest.approx(asked**3, abs=0.1)


def test_positions_behind_a_rejection_teach_nothing() -> None:
    calibration = Calibration(WIDTH)
    calibration.observe(np.full((1, WIDTH), 0.5), np.array([WIDTH]), np.array([0]))
    assert calibration.seen.sum(axis=1) == pytest.approx([1, 0, 0])
    calibration.observe(np.full((1, WIDTH), 0.5), np.array([1]), np.array([1]))
    assert calibration.seen.sum(axis=1) == pytest.approx([2, 0, 0], rel=1e-2)


def test_old_observations_fade() -> None:
    """After a change of the text the estimate follows it."""
    calibration = Calibration(1)
    confidence = np.full((20, 1), 0.8)
    for accepted, expected in ((1, 1.0), (0, 0.0)):
        for _ in range(500):
            calibration.observe(confidence, np.ones(20, int), np.full(20, accepted))
        assert calibration.acceptance(confidence[:1]) == pytest.approx(expected, abs=0.05)


def test_an_observation_counts_half_after_two_thousand_others() -> None:
    calibration = Calibration(1)
    calibration.observe(np.array([[0.2]]), np.array([1]), np.array([1]))
    calibration.observe(np.full((2000, 1), 0.8), np.ones(2000, int), np.zeros(2000, int))
    # 4 observations' worth of the drafter's own word, and 8 of all positions': here, of the same.
    pooled = (0.5 + 4 * 0.2) / (0.5 + 4)
    assert calibration.acceptance(np.array([[0.2]])) == pytest.approx(
        (0.5 + 8 * pooled) / (0.5 + 8)
    )


def test_a_requests_bias_is_worth_eight_tokens_of_everybodys() -> None:
    """By hand: everybody's fades by 2% a block, a request's by a tenth."""
    bias = Bias(4)
    assert bias.of(np.array([0, 3])).tolist() == [1.0, 1.0]
    bias.observe(np.array([2, 0]), np.array([2.0, 3.0]), np.array([1, 0]))
    everybody = (1 + 8) / (5 + 8)
    assert bias.of_everybody() == pytest.approx(everybody)
    expected = [8 * everybody / (3 + 8), everybody, (1 + 8 * everybody) / (2 + 8)]
    assert bias.of(np.array([0, 1, 2])) == pytest.approx(expected)
    bias.observe(np.array([2, 1]), np.array([1.0, 4.0]), np.array([2, 4]))
    everybody = (0.9604 * 1 + 6 + 8) / (0.9604 * 5 + 5 + 8)
    assert bias.of_everybody() == pytest.approx(everybody)
    expected = [
        8 * everybody / (3 + 8),
        (4 + 8 * everybody) / (4 + 8),
        (0.9 + 2 + 8 * everybody) / (1.8 + 1 + 8),
        everybody,
    ]
    assert bias.of(np.arange(4)) == pytest.approx(expected)
    bias.forget(np.array([0, 1]))
    assert bias.of(np.arange(4)) == pytest.approx([everybody, everybody, expected[2], everybody])


@pytest.mark.parametrize(
    ("bias", "curve"), [(0.5, [0.45, 0.2]), (1.0, [0.9, 0.4]), (2.0, [1.0, 0.8])]
)
def test_a_bias_raises_or_lowers_the_whole_curve(bias: float, curve: list[float]) -> None:
    curves = survival_curves(np.array([[0.9, 0.4], [0.3, 0.0]]), np.array([bias, 1.0]))
    assert curves == pytest.approx(np.array([curve, [0.3, 0.0]]))


@given(
    st.lists(st.lists(st.floats(0, 1), min_size=WIDTH, max_size=WIDTH), min_size=1, max_size=4),
    st.floats(0, 3),
)
def test_survival_never_grows_and_is_a_probability(rates: list, bias: float) -> None:
    survival = np.cumprod(np.array(rates), axis=1)
    curves = survival_curves(survival, np.full(len(rates), bias))
    assert (np.diff(curves, axis=1) <= 0).all()
    assert ((curves >= 0) & (curves <= 1)).all()
