"""What the gate found, as numbers, as JSON and in words."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from vllm_dflash.tools.verify.verification import Finding, Level, Verification

TIED = Finding(0, 3, "a", "b", 0.125, is_tie=True)
WRONG = Finding(2, 0, "c", "d", 1.5, is_tie=False)
ENDED = Finding(2, 7, None, "e", math.inf, is_tie=False)
OTHER_TIE = Finding(2, 8, "f", "g", 0.25, is_tie=True)
LEVEL = Level.of(8, 12, 2.5, ((TIED,), (), (WRONG, ENDED, OTHER_TIE)))


def as_json(*levels: Level) -> dict[str, Any]:
    about = {"prompts": 3, "dtype": "bfloat16"}
    return json.loads(json.dumps(Verification(about, 0.2, levels).to_dict(), allow_nan=False))


def test_a_verification_as_json() -> None:
    written = as_json(Level.of(1, 5, 2.0, ((), (), ())), LEVEL)
    assert [one["concurrency"] for one in written.pop("levels")] == [1, 8]
    assert (LEVEL.identical, LEVEL.with_ties, LEVEL.with_regressions) == (1, 1, 1)
    assert (LEVEL.ties, LEVEL.regressions) == (2, 2)
    assert written == {
        "schema": "vllm-dflash.verify/1",
        "verdict": "regression",
        "tie": 0.2,
        "prompts": 3,
        "dtype": "bfloat16",
    }


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
    [
        ((0.1, 3.0, 0.2), 1),
        ((0.1, math.inf, 3.0), 1),
        ((math.nan, 0.1, 3.0), 0),
        ((3.0, 0.1, math.nan), 2),
        ((0.1, 0.1, 0.0), 0),
    ],
)
def test_the_worst_finding(regrets: tuple[float, ...], worst: int) -> None:
    """Values that cannot be compared are worse than any that can; the first of equals counts."""
    findings = [Finding(0, 0, "a", "b", regret, is_tie=False) for regret in regrets]
    for texts in ((tuple(findings),), tuple((one,) for one in findings)):
        assert Level.of(1, 0, None, texts).worst is findings[worst]


@pytest.mark.parametrize(
    ("finding", "words"),
    [
        (TIED, "0.125 nat at prompt 0, position 3: DFlash wrote 'a', plain decoding 'b'"),
        (ENDED, "not a tie at prompt 2, position 7: DFlash wrote the end, plain decoding 'e'"),
    ],
)
def test_a_finding_in_words(finding: Finding, words: str) -> None:
    assert str(finding) == words
