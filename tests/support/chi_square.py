"""Test whether two samples of continuations come from one distribution."""

from __future__ import annotations

from collections import Counter

import torch

LEAST_EXPECTED = 8
"""Continuations expected less often than this are counted together."""


def p_value(one: Counter, other: Counter) -> float:
    """Return a chi-square test's p-value that two samples of one size have one distribution."""
    both = one + other
    common = [key for key, count in both.items() if count >= 2 * LEAST_EXPECTED]
    rest = [sum(counts.values()) - sum(counts[key] for key in common) for counts in (one, other)]
    cells = [(one[key], other[key]) for key in common] + [tuple(rest)]
    statistic = sum((a - b) ** 2 / (a + b) for a, b in cells if a + b)
    freedom = len(cells) - 1
    assert freedom >= 10
    return float(torch.special.gammaincc(torch.tensor(freedom / 2), torch.tensor(statistic / 2)))


def compared(sample: list[tuple[int, ...]]) -> list[Counter]:
    """Count the second and third tokens, and the fourth and fifth."""
    return [Counter(tokens[1:3] for tokens in sample), Counter(tokens[3:5] for tokens in sample)]
