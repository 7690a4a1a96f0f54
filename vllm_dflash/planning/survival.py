"""How likely drafts are to be accepted: from the drafter's confidence and from what became of
earlier ones."""

from __future__ import annotations

import numpy as np

from vllm_dflash.planning import Floats, Ints

CONFIDENCE_KNOTS = np.array([0.0, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96, 0.99, 1.0])
PRIOR_TOKENS = 4.0
"""Observations the drafter's own word is worth."""
POSITION_PRIOR_TOKENS = 8.0
"""Observations that all positions together are worth to each."""
BIAS_PRIOR_TOKENS = 8.0
HALF_LIFE_TOKENS = 2000.0
"""Observed drafts after which an observation counts half."""
REQUEST_MEMORY, GLOBAL_MEMORY = 0.9, 0.98
"""What is left of a request's, and of everybody's, bias after one more observed draft block."""


class Calibration:
    """Acceptance probability of a draft, given that those before it were accepted.

    A table over position and confidence (probability of the drafter's most likely token) with
    linear interpolation between knots of confidence. Cells shrink to all positions together, and
    those to the drafter's own word. Old observations fade.
    """

    def __init__(self, max_draft: int) -> None:
        shape = (max_draft, len(CONFIDENCE_KNOTS))
        self.seen = np.zeros(shape)
        self.accepted = np.zeros(shape)
        self._update_rates()

    def acceptance(self, confidence: Floats) -> Floats:
        """Conditional acceptance probability of each draft, [D, w] to [D, w]."""
        lower, upper_share = _locate(confidence)
        position = np.arange(confidence.shape[1])
        low, high = self.rates[position, lower], self.rates[position, lower + 1]
        return low + upper_share * (high - low)

    def observe(self, confidence: Floats, drafted: Ints, accepted: Ints) -> None:
        """Learn from blocks [D, w] of which `drafted` tokens were verified, `accepted` accepted.

        Every accepted token and the first rejected one were tried; those behind it were not.
        """
        position = np.arange(confidence.shape[1])
        tried = position < np.minimum(accepted + 1, drafted)[:, None]
        _, column = np.nonzero(tried)
        lower, upper_share = _locate(confidence[tried])
        fate = (position < accepted[:, None])[tried]
        fade = 0.5 ** (len(column) / HALF_LIFE_TOKENS)
        for table, weight in ((self.seen, np.ones(len(column))), (self.accepted, fate)):
            table *= fade
            np.add.at(table, (column, lower), weight * (1.0 - upper_share))
            np.add.at(table, (column, lower + 1), weight * upper_share)
        self._update_rates()

    def keep(self, tokens: float) -> None:
        """Let all observations count for no more than so many."""
        share = min(1.0, tokens / max(float(self.seen.sum()), tokens))
        self.seen *= share
        self.accepted *= share
        self._update_rates()

    def _update_rates(self) -> None:
        pooled = self.accepted.sum(axis=0) + PRIOR_TOKENS * CONFIDENCE_KNOTS
        pooled /= self.seen.sum(axis=0) + PRIOR_TOKENS
        self.rates = self.accepted + POSITION_PRIOR_TOKENS * pooled
        self.rates /= self.seen + POSITION_PRIOR_TOKENS


def _locate(confidence: Floats) -> tuple[Ints, Floats]:
    """The knot below each confidence, and how far it is to the next, in [0, 1]."""
    place = np.interp(confidence, CONFIDENCE_KNOTS, np.arange(len(CONFIDENCE_KNOTS)))
    lower = np.minimum(place.astype(np.int64), len(CONFIDENCE_KNOTS) - 2)
    return lower, place - lower


class Bias:
    """How many more tokens are accepted than expected, per request and for all.

    A ratio of decayed counts. A request's shrinks to everybody's, which is where a new request
    starts, and everybody's to one.
    """

    def __init__(self, num_rows: int) -> None:
        self.expected = np.zeros(num_rows)
        self.accepted = np.zeros(num_rows)
        self.all_expected = 0.0
        self.all_accepted = 0.0

    def forget(self, rows: Ints) -> None:
        """Rows that are new requests' from now on."""
        self.expected[rows] = self.accepted[rows] = 0.0

    def of_everybody(self) -> float:
        """Accepted against expected tokens over recent drafts."""
        prior = BIAS_PRIOR_TOKENS
        return (self.all_accepted + prior) / (self.all_expected + prior)

    def of(self, rows: Ints) -> Floats:
        """Accepted against expected tokens of each request, [D]."""
        prior = BIAS_PRIOR_TOKENS
        return (self.accepted[rows] + prior * self.of_everybody()) / (self.expected[rows] + prior)

    def observe(self, rows: Ints, expected: Floats, accepted: Ints) -> None:
        """Learn from verified blocks of D requests: tokens expected and accepted, [D] each."""
        self.expected[rows] = REQUEST_MEMORY * self.expected[rows] + expected
        self.accepted[rows] = REQUEST_MEMORY * self.accepted[rows] + accepted
        memory = GLOBAL_MEMORY ** len(rows)
        self.all_expected = memory * self.all_expected + float(expected.sum())
        self.all_accepted = memory * self.all_accepted + float(accepted.sum())


def survival_curves(survival: Floats, bias: Floats) -> Floats:
    """Correct survival probabilities [D, w] by the bias of each request [D]; at most 1."""
    return np.minimum(survival * bias[:, None], 1.0)
