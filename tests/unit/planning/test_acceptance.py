"""What is learned of drafts, against plain bookkeeping of one draft at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_dflash.planning import Floats
from vllm_dflash.planning.acceptance import (
    CURVE_RATE,
    FURTHER,
    GLOBAL_FADES,
    GLOBAL_MEMORY,
    PRIOR_TOKENS,
    REQUEST_FADES,
    REQUEST_MEMORY,
    TRUST,
    TYPICAL_RATE,
    Acceptance,
    confidence_of_texts,
)

WIDTH, ROWS = 3, 4
Drafts = dict[int, tuple[list[float], int, int]]
"""Confidence, and how many drafts were verified and accepted, by row."""


class ByHand:
    """The ratios of `Acceptance`, and survival, in Python."""

    def __init__(self, of_texts: bool) -> None:
        self.of_texts = of_texts
        self.requests = [[0.0, 0.0] for _ in range(ROWS)]
        self.of_all = [0.0, 0.0]
        self.last: list[int | None] = [None] * ROWS
        self.last_of_all = 0

    def record(self, step: int, drafts: Drafts) -> None:
        fades = max(len(drafts), min(step - self.last_of_all, GLOBAL_FADES))
        self.of_all = [GLOBAL_MEMORY**fades * one for one in self.of_all]
        for row, (confidence, verified, accepted) in drafts.items():
            last, expected, counted = self.last[row], 0.0, 0
            idle = REQUEST_FADES if last is None else min(max(step - last, 1), REQUEST_FADES)
            for place in range(verified):
                is_right = place < accepted
                chance = confidence[place]
                expected += 1.0 - chance if self.of_texts else chance
                counted += is_right != self.of_texts
                if not is_right:  # those after it were not tried
                    break
            kept = [REQUEST_MEMORY**idle * one for one in self.requests[row]]
            self.requests[row] = [kept[0] + expected, kept[1] + counted]
            self.of_all = [self.of_all[0] + expected, self.of_all[1] + counted]
            self.last[row] = step
        self.last_of_all = step

    def ratio(self, row: int) -> float:
        expected, accepted = self.of_all
        of_all = (accepted + PRIOR_TOKENS) / (expected + PRIOR_TOKENS)
        expected, accepted = self.requests[row]
        return (accepted + PRIOR_TOKENS * of_all) / (expected + PRIOR_TOKENS)

    def survival(self, row: int, confidence: list[float]) -> list[float]:
        alive, found = 1.0, []
        for chance in confidence:
            if self.of_texts:
                alive *= max(1.0 - self.ratio(row) * (1.0 - chance), 0.0) if chance > 0.0 else 0.0
            else:
                alive *= min(self.ratio(row) * chance, 1.0)
            found.append(alive)
        return found


confidences = st.lists(st.floats(0, 1), min_size=WIDTH, max_size=WIDTH)
blocks = st.tuples(confidences, st.integers(1, WIDTH), st.integers(0, WIDTH)).map(
    lambda block: (block[0], block[1], min(block[1:]))
)
batches = st.dictionaries(st.integers(0, ROWS - 1), blocks, min_size=1)


@pytest.mark.parametrize("of_texts", [False, True])
@given(st.lists(st.tuples(st.integers(1, 40), batches), min_size=1, max_size=6))
def test_what_is_learned_equals_plain_bookkeeping(
    of_texts: bool, steps: list[tuple[int, Drafts]]
) -> None:
    learned, by_hand = Acceptance(WIDTH, ROWS, of_texts=of_texts), ByHand(of_texts)
    for passed, drafts in steps:
        learned.step += passed
        confidence, verified, accepted = map(np.array, zip(*drafts.values(), strict=True))
        learned.record_outcomes(np.array([*drafts]), confidence, verified, accepted)
        by_hand.record(learned.step, drafts)
        rows = np.arange(ROWS)
        assert learned.ratio(rows) == pytest.approx([by_hand.ratio(row) for row in range(ROWS)])
        again = confidence[np.arange(ROWS) % len(confidence)]
        expected = [by_hand.survival(row, again[row].tolist()) for row in range(ROWS)]
        assert learned.survival(rows, again) == pytest.approx(np.array(expected))


def learn(
    learned: Acceptance,
    times: int,
    accepted: int,
    *,
    confidence: float,
    rows: tuple[int, ...] = (0,),
) -> None:
    """Verify drafts of this confidence in so many steps."""
    count = len(rows)
    for _ in range(times):
        learned.step += 1
        learned.record_outcomes(
            np.array(rows),
            np.full((count, WIDTH), confidence),
            np.full(count, WIDTH),
            np.full(count, accepted),
        )


def test_a_new_request_inherits_nothing_from_whose_row_it_takes() -> None:
    learned = Acceptance(WIDTH, ROWS, of_texts=False)
    learn(learned, 9, 0, confidence=0.9)
    learned.record_drafts(np.array([0]), np.full((1, WIDTH), 0.3))
    learned.forget(np.array([0]))
    typical = np.array([0, 3])
    learned.forget(np.array([3]))
    for known in (learned.curves, learned.counts):
        assert known[typical[0]].tolist() == known[typical[1]].tolist()
    assert learned.counts[0].tolist() == [0.0, 0.0]
    assert learned.num_observed[0] == 0
    assert learned.last_step[0] < -learned.step
    assert learned.curves[0].tolist() == learned.typical.tolist()


def falls_on(learned: Acceptance, survival: list[float]) -> Floats:
    """Return what is expected after many blocks that promised this, [K]."""
    for _ in range(300):
        learned.record_drafts(np.array([0]), np.array([survival]))
    return learned.curves[0]


def test_a_block_that_was_drafted_narrow_is_not_taken_for_one_that_ends() -> None:
    """Else a request that is drafted narrow would never be drafted wide again."""
    curve = falls_on(Acceptance(4, 1, of_texts=False), [0.9, 0.81])
    assert curve == pytest.approx(0.9 ** np.arange(1, 5))
    curve = falls_on(Acceptance(3, 1, of_texts=False), [0.5])
    assert curve == pytest.approx([0.5, 0.25, 0.125])
    # It falls as fast as it did on average: 0.25 after two drafts is a half each.
    curve = falls_on(Acceptance(4, 1, of_texts=False), [0.9, 0.25])
    assert curve == pytest.approx([0.9, 0.25, 0.125, 0.0625])
    assert falls_on(Acceptance(4, 1, of_texts=False), [0.0, 0.0]) == pytest.approx([0.0] * 4)


def test_a_block_moves_what_is_expected_of_its_own_request() -> None:
    learned = Acceptance(WIDTH, 2, of_texts=False)
    learned.record_drafts(np.array([1]), np.full((1, WIDTH), 0.5))
    assert learned.curves[0].tolist() == pytest.approx([0.8, 0.64, 0.512])
    assert learned.curves[1, 0] == pytest.approx(0.8 + CURVE_RATE * (0.5 - 0.8))
    # And what is expected of new ones, but those of one step together by half at most.
    assert learned.typical[0] == pytest.approx(0.8 + TYPICAL_RATE * (0.5 - 0.8))
    batch = Acceptance(WIDTH, 30, of_texts=False)
    batch.record_drafts(np.arange(30), np.full((30, WIDTH), 0.2))
    assert batch.typical[0] == pytest.approx(0.5 * 0.8 + 0.5 * 0.2)
    assert learned.num_observed.tolist() == [0, 1]
    learned.record_drafts(np.zeros(0, np.int64), np.zeros((0, 0)))
    assert learned.num_observed.tolist() == [0, 1]


def test_an_expected_curve_is_corrected_draft_by_draft() -> None:
    """A drafter half as good as it says has a quarter of its second drafts accepted."""
    learned = Acceptance(WIDTH, 1, of_texts=False)
    learned.of_all[:] = learned.counts[0] = 1e9, 0.5e9
    expected = learned.expected(np.array([0]))[0]
    assert expected == pytest.approx([0.8 / 2, 0.64 / 4, 0.512 / 8], rel=1e-6)
    learned.of_all[:] = learned.counts[0] = 1e9, 9e9
    assert learned.expected(np.array([0])).tolist() == [[1.0] * 3]
    # A flat curve does not rise where drafts are accepted more often than they promise.
    learned.curves[0], learned.counts[0] = 0.1, (1e9, 1.2e9)
    assert learned.expected(np.array([0]))[0] == pytest.approx([0.12] * 3, rel=1e-3)
    texts = Acceptance(WIDTH, 1, of_texts=True)
    texts.curves[0] = 0.5
    texts.of_all[:] = texts.counts[0] = 1e9, 9e9  # what the curve has in it
    assert texts.expected(np.array([0]))[0] == pytest.approx(0.5 * FURTHER ** np.arange(WIDTH))


def test_confidence_of_texts_grows_with_what_matches_and_ends_with_the_prediction() -> None:
    found = confidence_of_texts(np.array([8, 2, 600, 0]), np.array([3, 1, 3, 0]), 3)
    assert found[0].tolist() == TRUST[[8, 9, 10]].tolist()
    assert found[1].tolist() == [TRUST[2], 0.0, 0.0]
    assert found[2].tolist() == [TRUST[-1]] * 3
    assert found[3].tolist() == [0.0] * 3
    assert TRUST[[2, 8]] == pytest.approx([0.54, 0.84], abs=0.01)
    assert (np.diff(TRUST[1:]) > 0).all()
