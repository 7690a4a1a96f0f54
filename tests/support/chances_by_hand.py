"""`planning.chances` in plain Python, which learns one draft at a time, and numpy."""

from __future__ import annotations

import numpy as np

from vllm_dflash.planning import Floats, Ints
from vllm_dflash.planning.chances import (
    BIAS_PRIOR_TOKENS,
    CONFIDENCE_KNOTS,
    GLOBAL_MEMORY,
    HALF_LIFE_TOKENS,
    POSITION_PRIOR_TOKENS,
    PRIOR_TOKENS,
    REQUEST_MEMORY,
    Chances,
    expect,
    learn,
)


class Calibration:
    """Calibration of K positions."""

    def __init__(self, max_draft: int) -> None:
        self.seen: Floats = np.zeros((max_draft, len(CONFIDENCE_KNOTS)))
        self.accepted: Floats = np.zeros_like(self.seen)

    def observe(self, confidence: Floats, tried: Ints, right: Ints) -> None:
        """Learn from blocks [D, w]: `tried` drafts were verified, `right` accepted, [D] each."""
        counts = [min(r + 1, t) for r, t in zip(right, tried, strict=True)]
        for table in (self.seen, self.accepted):
            table *= 0.5 ** (sum(counts) / HALF_LIFE_TOKENS)
        for row, count in enumerate(counts):
            for position in range(count):
                sure = confidence[row, position]
                knot = max(i for i, k in enumerate(CONFIDENCE_KNOTS[:-1]) if k <= sure or i == 0)
                width = CONFIDENCE_KNOTS[knot + 1] - CONFIDENCE_KNOTS[knot]
                upper = (sure - CONFIDENCE_KNOTS[knot]) / width
                for cell, share in ((knot, 1 - upper), (knot + 1, upper)):
                    self.seen[position, cell] += share
                    self.accepted[position, cell] += share * (position < right[row])

    @property
    def rates(self) -> Floats:
        """Acceptance rates, [K, knots]."""
        rates = np.zeros_like(self.seen)
        for knot, own_word in enumerate(CONFIDENCE_KNOTS):
            pooled = self.accepted[:, knot].sum() + PRIOR_TOKENS * own_word
            pooled /= self.seen[:, knot].sum() + PRIOR_TOKENS
            rates[:, knot] = self.accepted[:, knot] + POSITION_PRIOR_TOKENS * pooled
            rates[:, knot] /= self.seen[:, knot] + POSITION_PRIOR_TOKENS
        return rates

    def acceptance(self, confidence: Floats) -> Floats:
        """Return the acceptance for confidences, [D, w] to [D, w]."""
        rates = self.rates
        return np.array(
            [
                [np.interp(sure, CONFIDENCE_KNOTS, rates[place]) for place, sure in enumerate(row)]
                for row in confidence
            ]
        ).reshape(confidence.shape)


class Bias:
    """Bias of `num_rows` requests."""

    def __init__(self, num_rows: int) -> None:
        self.requests = np.zeros((num_rows, 2))
        self.overall = np.zeros(2)

    def forget(self, rows: Ints) -> None:
        self.requests[rows] = 0.0

    def observe(self, rows: Ints, expected: Floats, accepted: Ints) -> None:
        """Learn from expected and accepted tokens of D requests, [D] each, no row twice."""
        came = np.stack([expected, accepted], axis=1)
        self.requests[rows] = REQUEST_MEMORY * self.requests[rows] + came
        self.overall = GLOBAL_MEMORY ** len(rows) * self.overall + came.sum(axis=0)

    def of_all(self) -> float:
        expected, accepted = self.overall + BIAS_PRIOR_TOKENS
        return float(accepted / expected)

    def of(self, rows: Ints) -> Floats:
        """Return the bias of these requests, [D]."""
        prior = BIAS_PRIOR_TOKENS * self.of_all()
        return (self.requests[rows, 1] + prior) / (self.requests[rows, 0] + BIAS_PRIOR_TOKENS)


def bias_of_all(chances: Chances) -> float:
    """Return recently accepted relative to expected tokens, over all requests."""
    expected, accepted = chances.bias_of_all + BIAS_PRIOR_TOKENS
    return float(accepted / expected)


def observe(chances: Chances, confidence: Floats, tried: Ints, right: Ints) -> None:
    """Learn from blocks [D, w] of the first D rows, of which `tried` drafts were verified."""
    rows = np.arange(len(confidence))
    expect(chances, rows, confidence, np.full(len(rows), confidence.shape[1]))
    chances.num_verified[rows] = tried
    learn(chances, rows, tried, tried, right)
