"""The gate's own steps, on servers that count upwards instead of computing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from support.instant_server import InstantServer
from vllm_dflash.tools.verify.gate import GateSettings, verify
from vllm_dflash.tools.verify.verification import Finding, Level, Verification
from vllm_dflash.tools.verify.verify_command import make_notes

STOP = 9
REGRET = {(4, 5): 0.125, (7, 6): 0.5}
"""Regret by the next number and the one written instead; others have a whole nat."""
TEXTS = 3


class Counting(InstantServer):
    """Writes the next number, up to 8, then 9, which ends a text. A prompt is one digit."""

    def __init__(self, *wrong: dict[int, int], **facts: Any) -> None:
        known = {"dtype": "bfloat16", "max_model_len": 100, "max_num_seqs": 4}
        super().__init__(stop_tokens=[STOP], **(known | facts))
        self.wrong = wrong
        """What it writes instead of a number, at each concurrency; the last is for all others."""

    def ask(self, path: str, body: Any = None) -> Any:
        match path, body:
            case "/tokenize", {"prompt": text}:
                return {"tokens": [int(digit) for digit in text]}
            case "/detokenize", {"tokens": [token]}:
                return {"prompt": f"<{token}>"}
        return super().ask(path, body)

    def write(self, prompt: list[int], limit: int) -> list[int]:
        # The level is told by the number of texts before.
        level = min((len(self.asked) - 1) // TEXTS, len(self.wrong) - 1)
        wrong = self.wrong[level] if self.wrong else {}
        text = [*prompt]
        most = self.facts["max_new_tokens"] or limit
        room = min(limit, most, self.facts["max_model_len"] - len(prompt))
        assert room > 0
        while len(text) - len(prompt) < room and text[-1] != STOP:
            text.append(wrong.get(text[-1] + 1, text[-1] + 1))
        return text[len(prompt) :]

    def regret(self, best: int, scored: int) -> float:
        return REGRET.get((best, scored), 1.0) * (scored != best)


class Undrafted(Counting):
    def ask(self, path: str, body: Any = None) -> Any:
        answer = super().ask(path, body)
        self.drafts = 0
        return answer


def verified(dflash: Counting, plain: Counting | None = None, **changes: Any) -> Verification:
    """Verify three prompts; two engines are never open at a time."""
    plain = plain or Counting(dtype=dflash.facts["dtype"])
    opened: list[Counting] = []

    @contextmanager
    def opening(engine: Counting) -> Iterator[Counting]:
        assert not opened
        opened.append(engine)
        yield engine
        opened.remove(engine)

    settings = GateSettings(**{"concurrency": (1, 3), "tokens": 20, **changes})
    return verify(["1", "2", "5"], lambda: opening(dflash), lambda: opening(plain), settings)


def places(level: Level) -> list[list[int]]:
    """Return where each text diverges."""
    found = level.divergences
    return [[one.position for one in found if one.prompt == prompt] for prompt in range(TEXTS)]


def test_identical() -> None:
    result = verified(Counting(max_num_seqs=3))  # as many as it takes
    assert (result.verdict, result.exit_code, result.tie) == ("lossless", 0, 0.2)
    assert [level.concurrency for level in result.levels] == [1, 3]
    assert [level.identical for level in result.levels] == [3, 3]
    assert result.levels[0].worst is None
    for level in result.levels:  # each level counts its own drafts
        assert (level.drafts_verified, level.acceptance_length) == (18, 2.0)


def test_a_tie_and_what_follows_it() -> None:
    """5 instead of 4 leaves a text that is the target's own again: 1 2 3 5 6 7 8 9."""
    result = verified(Counting({4: 5}))
    level = result.levels[1]
    assert result.verdict == "lossless"
    assert (level.identical, level.with_ties, level.with_regressions) == (1, 2, 0)
    assert (level.ties, level.regressions) == (2, 0)
    assert level.worst == Finding(0, 2, "<5>", "<4>", 0.125, is_tie=True)


def test_each_concurrency_is_judged_by_its_own_texts() -> None:
    """An engine that is wrong at one concurrency is found there, and at no other."""
    result = verified(Counting({7: 6}, {4: 5}, {}), concurrency=(1, 3, 4), tokens=6)
    assert (result.verdict, result.exit_code) == ("regression", 1)
    # After 1: 2 3 4 5 6 6; after 2: 3 4 5 6 6 6; after 5: 6 6 6 6 6 6.
    wrong = [[5], [4, 5], [1, 2, 3, 4, 5]]
    assert [places(level) for level in result.levels] == [wrong, [[2], [1], []], [[], [], []]]
    assert [(level.regressions, level.ties) for level in result.levels] == [(8, 0), (0, 2), (0, 0)]
    assert [level.with_regressions for level in result.levels] == [3, 0, 0]


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


def test_prompts_repeat_until_as_many_run_as_a_level_says() -> None:
    dflash = Counting({}, {4: 6}, max_num_seqs=8)
    result = verified(dflash, concurrency=(1, 8))
    assert len(dflash.asked) == 3 + 8
    assert [level.texts for level in result.levels] == [3, 8]
    assert [one.prompt for one in result.levels[1].divergences if one.position < 3] == [
        0,
        1,
        0,
        1,
        0,
        1,
    ]


def test_an_engine_that_limits_answers_is_asked_for_no_more() -> None:
    """Otherwise plain decoding writes on where a text is compared piece by piece."""
    limited = {"max_new_tokens": 4}
    result = verified(Counting({4: 5}, **limited), Counting(**limited))
    assert result.verdict == "lossless"
    assert result.levels[0].ties == 2


def test_a_text_that_ends_without_reason() -> None:
    class Short(Counting):
        def write(self, prompt: list[int], limit: int) -> list[int]:
            return super().write(prompt, limit)[:2]

    result = verified(Short())
    assert result.levels[0].worst == Finding(0, 2, None, "<4>", math.inf, is_tie=False)
    written = result.to_dict()["levels"][0]
    assert written["worst"]["regret"] is None  # JSON has no infinity
    assert written["regressions"] == 3


def test_nothing_drafted_is_no_success() -> None:
    result = verified(Undrafted())
    assert (result.verdict, result.exit_code) == ("nothing drafted", 2)
    assert any("draft_length" in note for note in make_notes(result))
    assert verified(Undrafted({4: 6})).verdict == "regression"


@pytest.mark.parametrize(
    ("dflash", "plain", "message"),
    [
        ({"max_num_seqs": 2}, {}, "raise --max-num-seqs"),
        ({"max_model_len": 1}, {}, "raise the engine's --max-model-len"),
        ({"dtype": "float32"}, {}, "dtype is float32 in DFlash's engine and bfloat16"),
        ({"max_model_len": 64}, {}, r"max_model_len is 64 .* 100 .*set --max-model-len"),
        ({}, {"drafter": "somebody"}, "drafts as well"),
    ],
)
def test_refused_with_the_remedy(
    dflash: dict[str, Any], plain: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        verified(Counting(**dflash), Counting(**plain))


def test_texts_end_at_the_context_limit() -> None:
    """Nothing can be continued after a tie in the last place."""
    result = verified(Counting({4: 5}, max_model_len=4), Counting(max_model_len=4))
    assert result.verdict == "lossless"
    assert places(result.levels[0])[0] == [2]


TIED = Finding(0, 3, "a", "b", 0.125, is_tie=True)
WRONG = Finding(2, 0, "c", "d", 1.5, is_tie=False)
ENDED = Finding(2, 7, None, "e", math.inf, is_tie=False)


def level(verified: int, *findings: Finding) -> Level:
    return Level.of(1, verified, None, (findings,))


@pytest.mark.parametrize(
    ("levels", "verdict", "exit_code"),
    [
        ([level(5)], "lossless", 0),
        ([level(5), level(0, TIED)], "lossless", 0),
        ([level(0), level(0, TIED)], "nothing drafted", 2),
        ([level(5), level(0, ENDED)], "regression", 1),
        ([level(0, TIED, WRONG), level(0)], "regression", 1),
    ],
)
def test_a_verdict_is_of_all_levels(levels: list[Level], verdict: str, exit_code: int) -> None:
    result = Verification({}, 0.2, tuple(levels))
    assert (result.verdict, result.exit_code) == (verdict, exit_code)


@pytest.mark.parametrize(
    ("regrets", "worst"),
    [((0.1, 3.0, 0.2), 1), ((0.1, math.inf, 3.0), 1), ((math.nan, 0.1, 3.0), 0)],
)
def test_the_worst_finding(regrets: tuple[float, ...], worst: int) -> None:
    """What cannot be compared is worse than anything."""
    findings = [Finding(0, 0, "a", "b", regret, is_tie=False) for regret in regrets]
    assert level(0, *findings).worst is findings[worst]
