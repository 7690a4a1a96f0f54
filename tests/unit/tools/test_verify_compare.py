"""The comparison on its own, with an engine that is a table of numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_dflash.tools.completions import Finished, Request
from vllm_dflash.tools.verify.divergence import FIRST_PIECE, Divergence, Text, Tokens, compare_all

STOP = 0
VOCABULARY = 6
PROMPT = (7, 8)


class Plain:
    """Plain decoding by a rule that depends on all tokens so far; says what it was asked."""

    def __init__(self) -> None:
        self.rounds: list[list[Request]] = []

    def logprobs(self, tokens: Tokens) -> list[float]:
        # A stop token is rarely the best; every other token is somewhere.
        seed = sum((i + 1) * token for i, token in enumerate(tokens, start=1))
        values = [-((7 * token + seed) % 11) / 10 for token in range(VOCABULARY)]
        values[STOP] -= 0.0 if seed % 13 == 0 else 2.0
        return values

    def best(self, tokens: Tokens) -> int:
        values = self.logprobs(tokens)
        return values.index(max(values))

    def regret(self, tokens: Tokens, token: int) -> float:
        values = self.logprobs(tokens)
        return max(values) - values[token]

    def write(
        self, prompt: Tokens, limit: int, choose: Callable[[Tokens], int] | None = None
    ) -> Tokens:
        choose = choose or self.best
        text: Tokens = ()
        while len(text) < limit and STOP not in text:
            text += (choose(prompt + text),)
        return text

    def ask(self, requests: list[Request]) -> Sequence[Finished]:
        self.rounds.append(requests)
        return [
            Finished(
                list(self.write(tuple(one.tokens), one.max_tokens)),
                None if one.scored is None else self.regret(tuple(one.tokens), one.scored),
            )
            for one in requests
        ]

    def compare(self, *texts: Tokens, limit: int) -> list[list[Divergence]]:
        reference = self.write(PROMPT, limit)
        return compare_all([Text(PROMPT, reference, one, limit) for one in texts], {STOP}, self.ask)


def expected(plain: Plain, text: Tokens) -> list[Divergence]:
    """Return each token that plain decoding would not choose after DFlash's tokens before it."""
    return [
        Divergence(i, token, wanted, plain.regret(PROMPT + text[:i], token))
        for i, token in enumerate(text)
        if token != (wanted := plain.best(PROMPT + text[:i]))
    ]


def without_ends(limit: int) -> st.SearchStrategy[Tokens]:
    tokens = st.integers(1, VOCABULARY - 1)
    return st.lists(tokens, min_size=limit, max_size=limit).map(tuple)


@given(st.data())
@settings(max_examples=2 * settings().max_examples)
def test_rare_mistakes_far_apart_are_all_found(data: st.DataObject) -> None:
    """Texts as engines write them: plain decoding's except for some tokens, even stop tokens."""
    plain = Plain()
    limit = data.draw(st.integers(1, 90))
    places = data.draw(st.dictionaries(st.integers(0, limit - 1), st.integers(0, VOCABULARY - 1)))

    def choose(tokens: Tokens) -> int:
        return places.get(len(tokens) - len(PROMPT), plain.best(tokens))

    text = plain.write(PROMPT, limit, choose)
    (found,) = plain.compare(text, limit=limit)
    assert found == expected(plain, text)


@given(st.integers(1, 60), st.data())
def test_a_text_that_ends_too_soon(limit: int, data: st.DataObject) -> None:
    plain = Plain()
    text = plain.write(PROMPT, limit)
    kept = text[: data.draw(st.integers(0, len(text) - 1))]
    (found,) = plain.compare(kept, limit=limit)
    assert found == [Divergence(len(kept), None, text[len(kept)], math.inf)]


def test_a_stop_token_at_the_end_of_a_piece() -> None:
    """Nothing is wrong, and nothing is asked for after it."""
    plain = Plain()
    last = len(PROMPT) + FIRST_PIECE
    plain.best = lambda tokens: STOP if len(tokens) == last else 2
    text = plain.write(PROMPT, 50, lambda tokens: 3 if len(tokens) == 2 else plain.best(tokens))
    (found,) = plain.compare(text, limit=50)
    assert [one.position for one in found] == [0]
    assert len(plain.rounds) == 1


@given(st.integers(1, 60), st.integers(1, VOCABULARY - 1))
def test_a_text_that_goes_on_after_its_end(limit: int, token: int) -> None:
    plain = Plain()
    text = plain.write(PROMPT, limit)
    (found,) = plain.compare((*text, token, token), limit=limit)
    assert found == [Divergence(len(text), token, None, math.inf)]


def test_a_stop_token_of_its_own_that_does_not_stop() -> None:
    plain = Plain()
    text = (*plain.write(PROMPT, 20)[:3], STOP, 2, 2)
    (found,) = plain.compare(text, limit=20)
    assert [one.position for one in found] == [3, 4]
    ((scoring,),) = plain.rounds  # nothing is asked for after it
    assert scoring.scored == STOP
    assert found[1] == Divergence(4, 2, None, math.inf)


@given(st.lists(without_ends(40), min_size=1, max_size=5))
def test_many_texts_share_rounds(texts: list[Tokens]) -> None:
    alone = [Plain() for _ in texts]
    together = Plain()
    apart = [one.compare(text, limit=40)[0] for one, text in zip(alone, texts, strict=True)]
    assert together.compare(*texts, *texts, limit=40) == apart + apart
    assert len(together.rounds) == max(len(one.rounds) for one in alone)
    assert all(len({*requests}) == len(requests) for requests in together.rounds)


@pytest.mark.parametrize(
    ("regret", "tie", "is_tie"),
    [
        (0.2, 0.2, True),
        (0.201, 0.2, False),
        (0.0, 0.0, True),
        (1e-6, 0.0, False),
        (math.inf, 0.2, False),
        (None, 0.2, False),  # of which plain decoding said nothing
    ],
)
def test_ties(regret: float | None, tie: float, is_tie: bool) -> None:
    text = Text(PROMPT, (1,), (2,), 1)
    ((found,),) = compare_all([text], {STOP}, lambda requests: [Finished([1], regret)])
    assert found.is_tie(tie) is is_tie
