"""What the gate found, as a verdict and an exit code."""

from __future__ import annotations

import math

import pytest

from vllm_dflash.tools.verify.verification import Finding, Level, Verification

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
