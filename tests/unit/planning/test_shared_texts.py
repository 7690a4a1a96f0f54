"""Other requests' answers, against a plain search."""

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vllm_dflash.planning.texts import (
    CAPACITY,
    END,
    LONGEST,
    SHORTEST_RECENT,
    NgramIndex,
    RecentOutputs,
    look_up_recent,
    remember,
)

MAX_TOKENS, MOST = 64, 6
outputs_of_a_small_vocabulary = st.lists(st.integers(0, 2), max_size=24)


def as_tokens(output: list[int]) -> np.ndarray:
    return np.array(output, np.int32)


def naive_recall(kept: list[int], wanted: list[int]) -> tuple[int, list[int]]:
    """Length of the longest match, and what follows the last such match, up to the output's end."""
    best, followed = 0, list[int]()
    for place in range(1, len(kept)):
        size = 0
        while (
            size < min(place, LONGEST, len(wanted)) and kept[place - 1 - size] == wanted[-1 - size]
        ):
            size += 1
        if size >= max(best, SHORTEST_RECENT):
            best, followed = size, kept[place : kept.index(END, place)]
    return (best, followed) if followed else (0, [])


@settings(max_examples=200, deadline=None)
@given(st.lists(outputs_of_a_small_vocabulary, max_size=6), outputs_of_a_small_vocabulary)
@example([[0] * 20, [1] * 20, [2] * 22], [2] * 9)  # full, except for the last end
def test_recalled_is_what_a_naive_search_finds(outputs: list[list[int]], wanted: list[int]) -> None:
    capacity = 64
    recent, kept = RecentOutputs.empty(capacity), list[int]()
    for output in outputs:
        remember(recent, as_tokens(output))
        if len(output) >= SHORTEST_RECENT:
            if len(kept) + len(output) + 1 > capacity:
                kept = kept[-capacity // 2 :]
            kept += [*output, END]
    assert recent.text[: recent.length[0]].tolist() == kept
    size, start = look_up_recent(recent, as_tokens(wanted), len(wanted))
    expected, followed = naive_recall(kept, wanted)
    assert size == expected
    if size:
        assert kept[start : kept.index(END, start)] == followed


def test_memory_is_bounded() -> None:
    """If an answer is longer than half of it, the beginning is kept."""
    recent = RecentOutputs.empty(64)
    for first in range(0, 4000, 40):
        remember(recent, np.arange(first, first + 40, dtype=np.int32))
        assert recent.length[0] <= 64
    newest = np.arange(3960, 3970, dtype=np.int32)
    size, start = look_up_recent(recent, newest, len(newest))
    assert size == len(newest)
    assert recent.text[start : start + 3].tolist() == [3970, 3971, 3972]
    gone = np.arange(3800, 3810, dtype=np.int32)
    assert look_up_recent(recent, gone, len(gone)) == (0, 0)
    assert sum(one.nbytes for one in RecentOutputs.empty(CAPACITY)) < 600_000


class Shared:
    """Requests, one after the other, each with a prompt and then one token a step."""

    def __init__(self, *, shares_outputs: bool = True) -> None:
        self.matches = NgramIndex(2, MAX_TOKENS, MOST, shares_outputs=shares_outputs)
        self.texts = np.zeros((2, MAX_TOKENS), np.int32)

    def answer(self, name: str, prompt: list[int], output: list[int]) -> list[list[int]]:
        """Answer a request; return what was predicted after each token of the output."""
        found = []
        self.texts[0, : len(prompt)] = prompt
        limits = np.array([MAX_TOKENS])
        for number, token in enumerate(output):
            context = np.array([len(prompt) + number])
            self.texts[0, len(prompt) + number] = token
            told = self.matches.look_up([name], self.texts, context, np.array([1]), limits, MOST)
            found.append(self.matches.tokens(0, int(told.lengths[0])))
        return found

    def end(self, *names: str) -> None:
        self.matches.end(names, self.texts)


OUTPUT = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]


def test_what_one_was_answered_another_may_be_as_well() -> None:
    """It is predicted from the fourth token to the answer's end, whatever the prompts say."""
    engine = Shared()
    assert not any(engine.answer("a", [1, 2, 3], OUTPUT))
    engine.end("a")
    found = engine.answer("b", [7, 8], OUTPUT)
    expected = [OUTPUT[known : known + MOST] for known in range(4, len(OUTPUT))]
    assert found == [[], [], [], *expected, []]


def test_prompts_are_not_shared() -> None:
    engine = Shared()
    engine.answer("a", OUTPUT, [1, 2, 3, 4])
    engine.end("a")
    assert not any(engine.answer("b", [7, 8], OUTPUT))


def test_what_a_client_adds_to_a_session_is_no_answer() -> None:
    """vLLM continues under the same id, with the answer and the next part as the prompt."""
    engine, added = Shared(), [31, 32, 33, 34, 35, 36]
    engine.answer("a", [1, 2, 3], [4, 5, 6, 7])
    engine.answer("a", [1, 2, 3, 4, 5, 6, 7, *added], OUTPUT)
    engine.end("a")
    assert not any(engine.answer("b", [7, 8], added))
    engine.end("b")
    assert any(engine.answer("c", [7, 8], OUTPUT))


def test_input_that_is_streamed_token_by_token_is_no_answer() -> None:
    """vLLM drops a turn's last token, so a part of one token makes the text no longer."""
    engine, streamed = Shared(), [31, 32, 33, 34, 35, 36]
    prompt = [1, 2, 3]
    engine.answer("a", prompt, [4])
    for token in streamed:
        prompt = [*prompt, token]
        engine.matches.restart(["a", "of another batch"])
        engine.answer("a", prompt, [4])
    engine.end("a")
    assert not any(engine.answer("b", [7, 8], streamed))


def test_an_id_that_is_used_again_begins_anew() -> None:
    engine = Shared()
    engine.answer("a", [1, 2, 3], [4, 5])
    engine.end("a")
    engine.answer("a", [21, 22, 23, 24, 25], OUTPUT)
    engine.end("a")
    assert not any(engine.answer("b", [7, 8], [21, 22, 23, 24, 25]))


def test_the_own_text_goes_on_where_the_others_answer_ends() -> None:
    engine, own = Shared(), [12, 13, 14, 15, 99, 98, 97, 96, 95, 94, 11]
    engine.answer("a", [1, 2, 3], [11, 12, 13, 14, 15, 16])
    engine.end("a")
    assert engine.answer("b", own, [12, 13, 14, 15])[-1] == [99, 98, 97, 96, 95, 94]


def test_of_a_batch_those_who_have_ended_are_remembered() -> None:
    """Each by its own text. Other requests go on, are in their prompt, or are new."""
    outputs = {
        name: [20 * number + token for token in OUTPUT] for number, name in enumerate("aenp")
    }
    matches = NgramIndex(5, MAX_TOKENS, MOST, shares_outputs=True)
    texts = np.zeros((4, MAX_TOKENS), np.int32)
    of_prompts, produced = np.array([5, 3, 4, 6]), np.array([10, 10, 1, 0])
    for text, of_prompt, output in zip(texts, of_prompts, outputs.values(), strict=True):
        text[of_prompt : of_prompt + len(output)] = output
    lens = of_prompts + produced - 1
    limits = np.full(4, MAX_TOKENS)
    matches.look_up([*outputs], texts, lens, produced, limits, MOST)
    matches.end({"e", "of another batch"}, texts)
    for name, output in outputs.items():
        texts[0, :10] = [7, 8, *output[:8]]
        asked = np.array([9]), np.array([1]), limits[:1]
        found = matches.look_up([f"like {name}"], texts, *asked, MOST)
        assert found.lengths.tolist() == [2 * (name == "e")]


def test_nothing_is_shared_by_default() -> None:
    engine = Shared(shares_outputs=False)
    engine.answer("a", [1, 2, 3], OUTPUT)
    engine.end("a")
    assert not any(engine.answer("b", [7, 8], OUTPUT))


def test_the_own_text_counts_where_it_matches_as_long() -> None:
    engine = Shared()
    engine.answer("a", [1, 2, 3], [11, 12, 13, 14, 15, 16])
    engine.end("a")
    own = [5, 11, 12, 13, 14, 99, 98, 97, 96, 95, 94, 6]
    assert engine.answer("b", own, [11, 12, 13, 14])[-1][:2] == [99, 98]
    # The other request's match is longer, by its first token.
    engine.answer("c", [1, 2, 3], [6, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20])
    engine.end("c")
    assert engine.answer("d", own, [11, 12, 13, 14])[-1] == [15, 16, 17, 18, 19, 20]
