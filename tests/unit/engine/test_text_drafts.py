"""What texts predict: written into the step, beside blocks, and as tokens."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_dflash.engine.v1.text_drafts import TextDrafts
from vllm_dflash.planning.step import Step

MAX_TOKENS, MOST = 64, 6
NOBODY_ENDS = 1000


class Runner:
    """As much of a model runner as there is here: the texts of its requests.

    Those of `a`, `b` and so on stand in its rows from the last one up.
    """

    def __init__(self, *texts: list[int], writes_first: bool = False) -> None:
        """On V2 it has written down what was sampled before texts are looked up."""
        self.writes_first = writes_first
        self.all_texts = np.zeros((4, MAX_TOKENS), np.int32)
        self.ends = np.zeros(4, np.int32)
        self.texts = TextDrafts(4, MAX_TOKENS, MOST)
        for request, text in enumerate(texts):
            self.write(request, text)

    def write(self, request: int, tokens: list[int]) -> None:
        """Add to a text."""
        end = self.ends[request]
        self.all_texts[3 - request, end : end + len(tokens)] = tokens
        self.ends[request] += len(tokens)

    def text(self, request: int) -> list[int]:
        """All of it, with what stands behind its end."""
        return np.trim_zeros(self.all_texts[3 - request], "b").tolist()

    def step(self, *tokens: list[int], limit: int = NOBODY_ENDS) -> Step:
        """Each gets so many tokens, none while it is in its prompt."""
        sampled = np.full((len(tokens), max(map(len, tokens))), -1, np.int32)
        for request, new in enumerate(tokens):
            sampled[request, : len(new)] = new
        produced = np.array([len(new) for new in tokens])
        step = Step("abcd"[: len(tokens)], produced)
        step.context_lens = self.ends[: len(tokens)] + produced - 1  # all but the newest token
        places = 3 - np.arange(len(tokens))
        limits = np.full(len(tokens), limit)
        if self.writes_first:
            self.write_all(tokens)
            self.texts.look_up(step, self.all_texts, places, limits)
        else:
            self.texts.look_up(step, self.all_texts, places, limits, sampled)
            self.looked_up = [self.text(request) for request in range(len(tokens))]
            self.write_all(tokens)
        return step

    def write_all(self, tokens: tuple[list[int], ...]) -> None:
        for request, new in enumerate(tokens):
            self.write(request, new)


on_both_runners = pytest.mark.parametrize("writes_first", [False, True], ids=["V1", "V2"])


def lengths(step: Step) -> list[int] | None:
    return None if step.predicted is None else step.predicted.lengths.tolist()


def test_tokens_are_written_where_the_runner_will_write_them() -> None:
    """What was no token is not written."""
    runner = Runner([1, 2, 3], [4, 5], [6, 7, 8, 9])
    runner.step([11, 12], [], [13])
    assert runner.looked_up == [[1, 2, 3, 11, 12], [4, 5], [6, 7, 8, 9, 13]]
    assert [runner.text(request) for request in range(3)] == runner.looked_up


@on_both_runners
def test_what_a_text_predicts_and_what_became_of_it(writes_first: bool) -> None:
    runner = Runner([1, 2, 3, 4, 5, 1], [6, 7, 8], writes_first=writes_first)
    step = runner.step([2], [9])
    assert lengths(step) == [MOST, 0]
    assert step.predicted is not None
    assert step.predicted.matches.tolist() == [2, 0]
    assert step.predicted.known.tolist() == [0, 0]
    # Three tokens for what was predicted, of which two are right.
    step = runner.step([3, 4, 20], [10])
    assert step.predicted is not None
    assert lengths(step) == [0, 0]
    assert step.predicted.known.tolist() == [3, 0]
    assert step.predicted.came_true.tolist() == [2, 0]


@on_both_runners
def test_a_step_is_told_nothing_where_there_is_nothing(writes_first: bool) -> None:
    runner = Runner([1, 2, 3], [4, 5, 4], writes_first=writes_first)
    assert lengths(runner.step([4], [])) is None
    assert lengths(runner.step([5], [5])) == [0, MOST]
    assert lengths(runner.step([6], [6])) == [0, 0]  # which says what became of the last one
    assert lengths(runner.step([7], [7])) is None


@pytest.mark.parametrize(
    ("limit", "expected"), [(NOBODY_ENDS, MOST), (14, 6), (13, 5), (9, 1), (8, None), (6, None)]
)
def test_no_more_is_predicted_than_a_request_can_use(limit: int, expected: int | None) -> None:
    """Behind six tokens of context and the newest one, with room for one of the target's own."""
    runner = Runner([1, 2, 3, 4, 5, 1])
    assert lengths(runner.step([2], limit=limit)) == (None if expected is None else [expected])


@on_both_runners
def test_nothing_is_predicted_in_a_prompt(writes_first: bool) -> None:
    runner = Runner([1, 2, 1, 2], [1, 2, 1], writes_first=writes_first)
    assert lengths(runner.step([], [2])) == [0, MOST]


@on_both_runners
def test_tokens_of_each_request_of_the_batch(writes_first: bool) -> None:
    """They go round where the text does."""
    texts = [1, 2, 3, 4, 5, 1], [6, 7, 8], [1, 2, 9, 1]
    runner = Runner(*texts, writes_first=writes_first)
    assert lengths(runner.step([2], [9], [2])) == [MOST, 0, MOST]
    assert runner.texts.tokens(0, 4) == [3, 4, 5, 1]
    assert runner.texts.tokens(0, 0) == []
    assert runner.texts.tokens(2, 5) == [9, 1, 2, 9, 1]


@pytest.mark.parametrize(
    ("block", "agreed"),
    [
        ([3, 4, 5, 1], 4),
        ([3, 4, 5, 1, 2, 3, 4, 5], MOST),  # behind its end the text predicts nothing
        ([3, 4, 9, 1], 2),
        ([9, 4, 5, 1], 0),
        ([3], 1),
        ([], 0),  # none was finite
    ],
)
def test_how_far_a_block_says_what_the_text_does(block: list[int], agreed: int) -> None:
    runner = Runner([6, 7, 8], [1, 2, 3, 4, 5, 1], [1, 2, 3, 4, 5, 1])
    step = runner.step([9], [2], [2])
    # The first has no text to compare with, the last no block.
    runner.texts.compare(step, np.array([0, 1]), [[3, 4, 5, 1], block])
    assert step.agreed.tolist() == [0, agreed, 0]


def test_blocks_are_compared_with_nothing_where_nothing_is_predicted() -> None:
    runner = Runner([6, 7, 8])
    step = runner.step([9])
    runner.texts.compare(step, np.array([0]), [[3, 4, 5, 1]])
    assert step.agreed.tolist() == [0]
