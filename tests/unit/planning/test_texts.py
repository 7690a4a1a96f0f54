"""Look-ups in a text, against a plain search."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_dflash.planning.step import Predicted, StepRecord
from vllm_dflash.planning.texts import LONGEST, MAX_CANDIDATES, SHORTEST, NgramIndex

MAX_TOKENS = 512


def naive_match(text: list[int]) -> tuple[int, int]:
    """Length of the longest match of the last tokens, and the place after the last such match."""
    best, start = 0, 0
    for place in range(1, len(text)):
        size = 0
        while size < min(place, LONGEST) and text[place - 1 - size] == text[-1 - size]:
            size += 1
        if size >= max(best, SHORTEST):
            best, start = size, place
    return best, start


def naive_predicted(text: list[int], length: int) -> list[int]:
    start = naive_match(text)[1]
    longer = list(text)
    for number in range(length):
        longer.append(longer[start + number])
    return longer[len(text) :]


class Engine:
    """Requests whose texts grow as a test says."""

    def __init__(self, max_requests: int = 2) -> None:
        self.matches = NgramIndex(max_requests)
        self.texts = np.zeros((max_requests, MAX_TOKENS), np.int32)
        self.ends = np.zeros(max_requests, np.int64)

    def start(self, request: int, prompt: list[int]) -> None:
        self.texts[request, : len(prompt)] = prompt
        self.ends[request] = len(prompt)

    def step(self, ids: list[str], tokens: list[list[int]], most: int = 5) -> Predicted:
        sampled = np.full((len(ids), max(map(len, tokens))), -1, np.int32)
        for request, new in enumerate(tokens):
            sampled[request, : len(new)] = new
        produced = np.array([len(new) for new in tokens])
        self.ends[: len(ids)] += produced
        step = StepRecord(ids, produced, context_lens=self.ends[: len(ids)] - 1)
        limits = np.full(len(ids), MAX_TOKENS)
        found = self.matches.look_up(step, self.texts, sampled, limits, most)
        for request, new in enumerate(tokens):  # as the runner does
            self.texts[request, self.ends[request] - len(new) : self.ends[request]] = new
        return found

    def predicted(self, request: int, length: int) -> list[int]:
        return self.matches.tokens(request, length)


tokens_of_a_small_vocabulary = st.integers(0, 3)


@settings(max_examples=200, deadline=None)
@given(
    prompts=st.lists(
        st.lists(tokens_of_a_small_vocabulary, min_size=1, max_size=40), min_size=2, max_size=2
    ),
    steps=st.lists(
        st.lists(st.lists(tokens_of_a_small_vocabulary, max_size=4), min_size=2, max_size=2),
        min_size=1,
        max_size=8,
    ),
)
def test_look_ups_equal_naive_ones(prompts: list[list[int]], steps: list[list[list[int]]]) -> None:
    """Also where a step brings a request nothing, as in its prompt, or fewer tokens than others."""
    engine, texts, predicted = Engine(), [list(prompt) for prompt in prompts], [[], list[int]()]
    matches = [0, 0]
    for request, prompt in enumerate(prompts):
        engine.start(request, prompt)
    for tokens in steps:
        found = engine.step(["a", "b"], tokens)
        for request, new in enumerate(tokens):
            text, last = texts[request], predicted[request]
            right = [one == other for one, other in zip(last, new, strict=False)]
            assert found.num_observed[request] == len(right)
            assert found.num_correct[request] == np.cumprod(right, dtype=int).sum()
            assert found.last_matches[request] == matches[request]
            text += new
            size = naive_match(text)[0] if new else 0
            assert found.matches[request] == size
            assert found.lengths[request] == (5 if size else 0)
            predicted[request] = naive_predicted(text, 5) if size else []
            matches[request] = size
            assert engine.predicted(request, 5) == predicted[request]


def test_a_longer_match_than_the_longest_is_no_better() -> None:
    """The last one counts, also if an older one goes on."""
    engine, phrase = Engine(1), list(range(10, 20 + LONGEST))
    engine.start(0, [1, *phrase, 2, *phrase, 3, 1, *phrase[:-1]])
    found = engine.step(["a"], [phrase[-1:]])
    assert found.matches.tolist() == [LONGEST]
    assert engine.predicted(0, 2) == [3, 1]


def test_a_text_ends_at_its_limit() -> None:
    """The target adds a token of its own behind the drafts."""
    engine = Engine(1)
    engine.start(0, [1, 2] * ((MAX_TOKENS - 4) // 2))
    for token, room in ((1, 2), (2, 1), (1, 0), (2, 0)):
        assert engine.step(["a"], [[token]]).lengths.tolist() == [room]


def test_requests_do_not_read_each_others_texts() -> None:
    engine = Engine()
    engine.start(0, [1, 2, 3, 4, 1])
    engine.start(1, [5, 6, 7, 8, 1])
    found = engine.step(["a", "b"], [[2], [2]])
    assert found.lengths.tolist() == [5, 0]
    assert engine.predicted(0, 3) == [3, 4, 1]


def test_a_row_that_another_request_gets_has_forgotten_the_first_one() -> None:
    engine = Engine(1)
    engine.start(0, [1, 2, 3, 4, 1])
    for name in ("a", "b", "c"):  # there are rows for two
        engine.start(0, [1, 2, 3, 4, 1] if name == "a" else [9, 8, 7, 6, 1])
        found = engine.step([name], [[2]])
        assert found.lengths.tolist() == [5 if name == "a" else 0]


def test_texts_of_the_last_batch_are_kept_when_there_are_too_many() -> None:
    engine = Engine()
    for names in ("ab", "cd", "ef"):  # there is room for four
        for request in range(2):
            engine.start(request, [1, 2, 3, 4, 1])
        assert engine.step(list(names), [[2], [2]]).lengths.tolist() == [5, 5]
        assert len(engine.matches._texts) <= 4
    assert engine.step(["e", "f"], [[3], [4]]).num_correct.tolist() == [1, 0]
    assert list(engine.matches._texts) == ["e", "f"]


def test_a_request_that_was_left_out_of_a_batch_keeps_its_text() -> None:
    engine = Engine()
    for request in range(2):
        engine.start(request, [1, 2, 3, 4, 1])
    engine.step(["a", "b"], [[2], [2]])
    engine.step(["a"], [[3]])
    engine.texts[0], engine.ends[0] = engine.texts[1], engine.ends[1]
    assert engine.step(["b"], [[3, 4]]).num_correct.tolist() == [2]


def test_tokens_that_no_look_up_saw_are_read() -> None:
    engine = Engine(1)
    engine.start(0, [1, 2, 3, 4, 1])
    engine.step(["a"], [[2]])
    engine.texts[0, 6:9], engine.ends[0] = [5, 6, 5], 9
    assert engine.step(["a"], [[6]]).matches.tolist() == [2]
    assert engine.predicted(0, 2) == [5, 6]


def test_nothing_is_predicted_in_a_prompt() -> None:
    engine = Engine()
    engine.start(0, [1, 2, 3, 1, 2, 3])
    engine.start(1, [1, 2, 3, 1])
    found = engine.step(["a", "b"], [[], [2]])
    assert found.lengths.tolist() == [0, 5]
    assert engine.step(["a", "b"], [[1], [3]]).num_observed.tolist() == [0, 1]


def test_a_text_that_became_another_is_read_again() -> None:
    """A client may use a name twice."""
    engine = Engine()
    engine.start(0, [1, 2, 3, 4, 5, 6, 1])
    engine.step(["a"], [[2]])
    engine.start(0, [7, 8, 9, 7])
    found = engine.step(["a"], [[8]])
    assert found.matches.tolist() == [2]
    assert engine.predicted(0, 2) == [9, 7]
    engine.start(0, [4, 5, 6, 7])
    found = engine.step(["a"], [[4, 5]])  # before these it is shorter than before
    assert engine.predicted(0, 2) == [6, 7]


def test_who_joins_the_batch_is_read_anew() -> None:
    """Under the same name, with a text as long, or the next part of a session's input."""
    engine = Engine()
    engine.start(0, [1, 2, 3, 4, 5, 6, 1])
    assert engine.step(["a"], [[2]]).lengths.tolist() == [5]
    engine.start(0, [7, 8, 9, 4, 5, 6, 3, 5, 7])
    engine.matches.forget(["a", "of another batch"])
    found = engine.step(["a"], [[8]])
    assert found.num_observed.tolist() == [0]
    assert engine.predicted(0, 2) == [9, 4]


@pytest.mark.parametrize("length", [100, 400])
def test_a_text_that_was_written_to_be_slow_is_looked_up_in_few_places(length: int) -> None:
    """Thousands of places end like the text and go no further: only the last ones are compared."""
    engine = Engine(1)
    engine.start(0, [9, 9, 1, 2] + [3, 1, 2] * (length // 3) + [8, 9, 9, 1])
    found = engine.step(["a"], [[2]])
    assert length // 3 < MAX_CANDIDATES or found.matches.tolist() == [2]
    assert length // 3 > MAX_CANDIDATES or found.matches.tolist() == [4]
