"""Acceptance estimates, against plain bookkeeping and known truths."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.chances_by_hand import Bias, Calibration, observe
from vllm_dflash.planning.chances import Chances, expect, learn

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
def test_what_is_learned_equals_plain_bookkeeping(batches: list) -> None:
    """The bookkeeping goes one draft and one request at a time."""
    chances, calibration, bias = Chances.of(WIDTH, 5), Calibration(WIDTH), Bias(5)
    for batch in batches:
        confidence = np.array([block[0] for block in batch])
        tried = np.array([block[1] for block in batch])
        right = np.array([min(block[1], block[2]) for block in batch])
        rows, whole = np.arange(len(batch)), np.full(len(batch), WIDTH)
        survival = np.cumprod(calibration.acceptance(confidence), axis=1)
        corrected = np.minimum(survival * bias.of(rows)[:, None], 1.0)
        assert expect(chances, rows, confidence, whole) == pytest.approx(corrected)
        chances.num_verified[rows] = tried
        learn(chances, rows, tried, tried, right)
        calibration.observe(confidence, tried, right)
        within = np.arange(WIDTH) < tried[:, None]
        bias.observe(rows, (survival * within).sum(axis=1), right)
        assert chances.rates == pytest.approx(calibration.rates)
        assert chances.bias == pytest.approx(bias.requests)
        assert chances.bias_of_all == pytest.approx(bias.overall)


def test_survival_ends_where_drafts_do() -> None:
    chances = Chances.of(WIDTH, 2)
    curves = expect(chances, np.array([1, 0]), np.full((2, WIDTH), 0.5), np.array([2, 0]))
    assert curves == pytest.approx(np.array([[0.5, 0.25, 0.0], [0.0, 0.0, 0.0]]))
    assert chances.survival == pytest.approx(np.array([[0.0] * 3, [0.5, 0.25, 0.0]]))


def test_compared_with_what_was_expected() -> None:
    """Only accepted drafts and the first rejected one count; those after it are not looked at."""
    chances = Chances.of(WIDTH, 4)
    confidence = np.array([[0.9, 0.8, 0.7]] * 4)
    # The second is rejected; all of two are accepted; the first is rejected; none were verified.
    verified, accepted = np.array([3, 2, 3, 0]), np.array([1, 2, 0, 0])
    rates = chances.acceptance(confidence)[0]
    tried = [*rates[:2], *rates[:2], rates[0]]
    variance = sum(rate * (1 - rate) for rate in tried)
    found = chances.compared(confidence, verified, accepted)
    assert found == pytest.approx([3, sum(tried), variance])


def test_an_observation_counts_half_after_two_thousand_others() -> None:
    chances = Chances.of(1, 2000)
    observe(chances, np.array([[0.2]]), np.array([1]), np.array([1]))
    observe(chances, np.full((2000, 1), 0.8), np.ones(2000, int), np.zeros(2000, int))
    # The drafter's confidence is worth 4 observations, and all positions 8; here there is only one.
    pooled = (0.5 + 4 * 0.2) / (0.5 + 4)
    assert chances.acceptance(np.array([[0.2]])) == pytest.approx((0.5 + 8 * pooled) / (0.5 + 8))


def test_a_bias_is_of_what_was_verified() -> None:
    """It may be known whether a text's later drafts came true, too. That teaches only the rates."""
    chances, row, verified, four = Chances.of(4, 1), np.array([0]), np.array([2]), np.array([4])
    expect(chances, row, np.full((1, 4), 0.5), four)
    chances.num_verified[:] = verified
    learn(chances, row, verified, four, four)
    assert chances.accepted.sum(axis=1) == pytest.approx(np.ones(4))
    assert chances.bias == pytest.approx(np.array([[0.5 + 0.25, 2.0]]))
    assert chances.bias_of_all == pytest.approx(chances.bias[0])


def test_drafts_that_wait_for_their_turn_are_not_forgotten() -> None:
    """A step without their request has others' outcomes, and says nothing about theirs."""
    chances, confidence = Chances.of(WIDTH, 2), np.full((2, WIDTH), 0.5)
    expect(chances, np.arange(2), confidence, np.full(2, WIDTH))
    chances.num_verified[:] = WIDTH
    three = np.array([WIDTH])
    for row in (0, 1):
        learn(chances, np.array([row]), three, three, three)
    assert chances.seen.sum() == pytest.approx(2 * WIDTH, rel=0.01)
    assert chances.num_verified.tolist() == [0, 0]
