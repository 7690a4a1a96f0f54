"""The gate's own steps, on servers that count upwards instead of computing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from support.instant_server import InstantServer
from vllm_dflash.tools.completions import Finished, Request, complete
from vllm_dflash.tools.progress import Progress
from vllm_dflash.tools.verify import gate
from vllm_dflash.tools.verify.gate import GateSettings, verify
from vllm_dflash.tools.verify.verification import Finding, Level, Verification
from vllm_dflash.tools.verify.verify_command import make_notes

STOP = 9
REGRET = {(4, 5): 0.125, (7, 6): 0.5}
"""Regret by the next number and the one written instead; others have a whole nat."""


class Counting(InstantServer):
    """Writes the next number, up to 8, then 9, which ends a text. A prompt is one digit."""

    def __init__(self, wrong: dict[int, int] | None = None, **facts: Any) -> None:
        known = {"dtype": "bfloat16", "max_model_len": 100, "max_num_seqs": 4}
        super().__init__(stop_tokens=[STOP], **(known | facts))
        self.wrong = wrong or {}
        """What it writes instead of a number."""
        self.submitted: list[tuple[int, int]] = []
        self.requests: list[Request] = []

    def submit(self, requests: Sequence[Request], concurrency: int) -> None:
        self.submitted.append((len(requests), concurrency))
        self.requests = [*requests]

    def told(self, finished: list[Finished]) -> list[Finished]:
        return finished

    def ask(self, path: str, body: Any = None) -> Any:
        match path, body:
            case "/tokenize", {"prompt": text}:
                return {"tokens": [int(digit) for digit in text]}
            case "/detokenize", {"tokens": [token]}:
                return {"prompt": f"<{token}>"}
        return super().ask(path, body)

    def write(self, prompt: list[int], limit: int) -> list[int]:
        text = [*prompt]
        room = min(limit, self.facts["max_model_len"] - len(prompt))
        assert room > 0
        while len(text) - len(prompt) < room and text[-1] != STOP:
            text.append(self.wrong.get(text[-1] + 1, text[-1] + 1))
        return text[len(prompt) :]

    def regret(self, best: int, scored: int) -> float:
        return REGRET.get((best, scored), 1.0) * (scored != best)


@pytest.fixture(autouse=True)
def _submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tell servers which requests come together."""

    def submitting(
        server: Counting, requests: Sequence[Request], concurrency: int, *others: Any
    ) -> list[Finished]:
        server.submit(requests, concurrency)
        return server.told(complete(server, requests, concurrency, *others))

    monkeypatch.setattr(gate, "complete", submitting)


class Undrafted(Counting):
    def ask(self, path: str, body: Any = None) -> Any:
        answer = super().ask(path, body)
        self.drafts = 0
        return answer


class Stage:
    """Opens engines, never two at a time."""

    def __init__(self) -> None:
        self.open = 0

    @contextmanager
    def __call__(self, engine: Counting) -> Iterator[Counting]:
        assert self.open == 0
        self.open += 1
        yield engine
        self.open -= 1


def verified(
    dflash: Counting,
    plain: Counting | None = None,
    *,
    progress: Progress | None = None,
    **changes: Any,
) -> Verification:
    opening = Stage()
    plain = plain or Counting(dtype=dflash.facts["dtype"])
    settings: dict[str, Any] = {"concurrency": (1, 3), "tokens": 20, **changes}
    prompts = ["1", "2", "5"]
    return verify(
        prompts, lambda: opening(dflash), lambda: opening(plain), GateSettings(**settings), progress
    )


def by_prompt(level: Level) -> list[list[Finding]]:
    found = level.divergences
    return [[one for one in found if one.prompt == prompt] for prompt in range(level.texts)]


def test_identical() -> None:
    dflash, plain = Counting(), Counting()
    result = verified(dflash, plain)
    assert (result.verdict, result.exit_code, result.tie) == ("lossless", 0, 0.2)
    assert [level.concurrency for level in result.levels] == [1, 3]
    assert [level.identical for level in result.levels] == [3, 3]
    assert result.levels[0].worst is None
    for level in result.levels:  # each level counts its own drafts
        assert (level.drafts_verified, level.acceptance_length) == (18, 2.0)
    assert dflash.submitted == [(3, 1), (3, 3)]
    assert plain.submitted == [(3, 3)]


def test_a_tie_and_what_follows_it() -> None:
    """5 instead of 4 leaves a text that is the target's own again: 1 2 3 5 6 7 8 9."""
    result = verified(Counting({4: 5}))
    level = result.levels[1]
    assert result.verdict == "lossless"
    assert (level.identical, level.with_ties, level.with_regressions) == (1, 2, 0)
    assert (level.ties, level.regressions) == (2, 0)
    assert level.worst == Finding(0, 2, "<5>", "<4>", 0.125, is_tie=True)


@pytest.mark.parametrize("where", [1, 3, 4])
def test_each_concurrency_is_judged_by_its_own_texts(where: int) -> None:
    """An engine that is wrong at one concurrency is found there, and at no other."""

    class WrongAtOne(Counting):
        def submit(self, requests: Sequence[Request], concurrency: int) -> None:
            self.wrong = {7: 6} if concurrency == where else {4: 5} if concurrency == 3 else {}
            super().submit(requests, concurrency)

    result = verified(WrongAtOne(), concurrency=(1, 3, 4), tokens=6)
    assert (result.verdict, result.exit_code) == ("regression", 1)
    found = {level.concurrency: level for level in result.levels}
    assert [*found] == [1, 3, 4]
    # After 1: 2 3 4 5 6 6; after 2: 3 4 5 6 6 6; after 5: 6 6 6 6 6 6.
    wrong = [[(0, 5)], [(1, 4), (1, 5)], [(2, place) for place in range(1, 6)]]
    tied = [[(0, 2)], [(1, 1)], []]
    for concurrency, level in found.items():
        expected = wrong if concurrency == where else tied if concurrency == 3 else [[], [], []]
        places = [[(one.prompt, one.position) for one in text] for text in by_prompt(level)]
        assert places == expected
        assert level.regressions == (8 if concurrency == where else 0)
        assert level.with_regressions == (3 if concurrency == where else 0)
        assert level.ties == (2 if expected is tied else 0)


@pytest.mark.parametrize(
    ("dtype", "tie", "verdict"),
    [
        ("float32", None, "regression"),
        ("float32", 0.2, "lossless"),
        ("bfloat16", None, "lossless"),
        ("bfloat16", 0.1, "regression"),
    ],
)
def test_what_is_a_tie_depends_on_the_dtype(dtype: str, tie: float | None, verdict: str) -> None:
    assert verified(Counting({4: 5}, dtype=dtype), tie=tie).verdict == verdict


def test_a_text_that_ends_without_reason() -> None:
    class Short(Counting):
        def write(self, prompt: list[int], limit: int) -> list[int]:
            return super().write(prompt, limit)[:2]

    result = verified(Short())
    level = result.levels[0]
    assert level.regressions == 3
    assert level.worst == Finding(0, 2, None, "<4>", math.inf, is_tie=False)
    written = result.to_dict()["levels"][0]
    assert written["worst"]["regret"] is None  # JSON has no infinity
    assert written["regressions"] == 3


def test_nothing_drafted_is_no_success() -> None:
    result = verified(Undrafted())
    assert (result.verdict, result.exit_code) == ("nothing drafted", 2)
    assert any("draft_length" in note for note in make_notes(result))
    assert verified(Undrafted({4: 6})).verdict == "regression"


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (Counting(max_num_seqs=2), "raise its --max-num-seqs"),
        (Counting(max_model_len=1), "raise the engine's --max-model-len"),
    ],
)
def test_refused_with_the_remedy(engine: Counting, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        verified(engine)


def test_engines_that_differ_are_not_compared() -> None:
    with pytest.raises(ValueError, match="dtype is float32 in DFlash's engine and bfloat16"):
        verified(Counting(dtype="float32"), Counting())
    with pytest.raises(ValueError, match=r"max_model_len is 64 .* 100 .*set --max-model-len"):
        verified(Counting(max_model_len=64), Counting())


def test_an_unknown_regret_is_no_tie() -> None:
    class Silent(Counting):
        def told(self, finished: list[Finished]) -> list[Finished]:
            return [one._replace(regret=None) for one in finished]

    assert verified(Counting({4: 5})).verdict == "lossless"
    assert verified(Counting({4: 5}), Silent()).verdict == "regression"


def test_plain_decoding_must_not_draft() -> None:
    with pytest.raises(ValueError, match="drafts as well"):
        verified(Counting(), Counting(drafter="somebody"))


def test_texts_end_at_the_context_limit() -> None:
    """Nothing can be continued after a tie in the last place."""
    result = verified(Counting({4: 5}, max_model_len=4), Counting(max_model_len=4))
    assert result.verdict == "lossless"
    assert [one.position for one in by_prompt(result.levels[0])[0]] == [2]


def test_plain_decoding_is_asked_everything_at_once() -> None:
    """A score needs one token; a text continues after the token that was scored."""
    plain = Counting()
    verified(Counting({4: 5}), plain, concurrency=(3,), tokens=5)
    assert plain.submitted == [(3, 3), (4, 3)]
    assert plain.requests == [  # after 1: 2 3 5 6 7; after 2: 3 5 6 7 8; after 5: no divergence
        Request((1, 2, 3), 1, 5),
        Request((1, 2, 3, 5), 2),
        Request((2, 3), 1, 5),
        Request((2, 3, 5), 3),
    ]


def test_as_many_requests_as_the_engine_takes() -> None:
    assert verified(Counting(max_num_seqs=3)).verdict == "lossless"
