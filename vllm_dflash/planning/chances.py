"""Learns how likely drafts are to be accepted: those of blocks, and those that texts predict.

A draft's confidence is calibrated by what became of earlier drafts at its position. A request's
bias is how much better or worse its drafts do than that. For a block, confidence is the drafter's.
For a text, it is how far the text has matched up to the draft: a match of m tokens has become one
of m + j after j drafts came true. Whether a text's drafts would be accepted is known a step later,
verified or not, as far as the target has gone on by then.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_dflash.planning import Floats, Ints
from vllm_dflash.planning.compiled import compiled

CONFIDENCE_KNOTS = np.array([0.0, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96, 0.99, 1.0])
PRIOR_TOKENS = 4.0
"""Observations that the drafter's own confidence is worth."""
POSITION_PRIOR_TOKENS = 8.0
"""Observations that all positions together are worth for each one."""
BIAS_PRIOR_TOKENS = 8.0
HALF_LIFE_TOKENS = 2000.0
"""Observed drafts after which an observation counts half."""
REQUEST_MEMORY, GLOBAL_MEMORY = 0.9, 0.98
"""What is left of the bias of a request, and of all requests, after one more observed block."""
TRUST = 1.0 - 0.78 * np.maximum(np.arange(512.0), 1.0) ** -0.76
"""Confidence in the token after a match of this many tokens. In source code, 46% are wrong after a
match of 2, and 16% after one of 8."""
AGREEMENT = 8
"""Tokens of a match that one agreeing token of the drafter, made independently, is worth."""


class Chances(NamedTuple):
    """What is known about one kind of drafts: arrays, updated in place; each request has a row.

    Acceptance of a draft, given that those before it were accepted, is a table over position and
    confidence, linear between knots. Its cells shrink towards all positions together, and those
    towards the drafter's own confidence. A bias is a ratio of decayed counts. A request's bias
    shrinks towards that of all requests, where a new request starts; the latter shrinks towards 1.
    """

    seen: Floats
    """Drafts by position and confidence, [K, knots]; old ones fade."""
    accepted: Floats
    """Accepted drafts among them."""
    rates: Floats
    """Acceptance rates that follow from both."""
    bias: Floats
    """Tokens expected and accepted lately, of each request, [rows, 2]."""
    bias_of_all: Floats
    """The same of all requests together, [2]."""
    confidence: Floats
    """Confidence of each request's last drafts, [rows, K]."""
    survival: Floats
    """Probability that each of those and all before it are accepted, not corrected by bias."""
    num_verified: Ints
    """How many of them the next step verifies, [rows]."""

    @classmethod
    def of(cls, max_draft: int, num_rows: int) -> Chances:
        """Create chances of up to `max_draft` drafts (K), about which nothing is known yet."""
        seen, accepted, rates = np.zeros((3, max_draft, len(CONFIDENCE_KNOTS)))
        confidence, survival = np.zeros((2, num_rows, max_draft))
        num_verified = np.zeros(num_rows, np.int64)
        bias = np.zeros((num_rows, 2))
        made = cls(seen, accepted, rates, bias, np.zeros(2), confidence, survival, num_verified)
        update_rates(made)
        return made

    def forget(self, rows: Ints) -> None:
        """Reset rows that now belong to new requests."""
        self.bias[rows] = 0.0
        self.num_verified[rows] = 0

    def acceptance(self, confidence: Floats) -> Floats:
        """Return the chance of each draft given those before it, from its confidence, [D, w]."""
        columns = zip(self.rates, confidence.T, strict=False)
        return np.stack([np.interp(sure, CONFIDENCE_KNOTS, rates) for rates, sure in columns], 1)

    def compared(self, confidence: Floats, verified: Ints, accepted: Ints) -> Floats:
        """Return how many drafts of R requests were accepted, how many were expected to be, and the
        variance of that, [3]; `confidence`: [R, K]."""
        rates, places = self.acceptance(confidence), np.arange(confidence.shape[1])
        tried = places < np.minimum(accepted + 1, verified)[:, None]  # [R, K]
        variance = (tried * rates * (1.0 - rates)).sum()
        return np.array([accepted.sum(), (tried * rates).sum(), variance])

    def keep(self, tokens: float) -> None:
        """Let all observations together count for at most `tokens`."""
        share = tokens / max(float(self.seen.sum()), tokens)
        self.seen[:] *= share
        self.accepted[:] *= share
        update_rates(self)


@compiled
def locate(confidence: float) -> tuple[int, float]:
    """Return the knot below a confidence, and how far it is towards the next, in [0, 1]."""
    knot = 0
    while knot < len(CONFIDENCE_KNOTS) - 2 and confidence >= CONFIDENCE_KNOTS[knot + 1]:
        knot += 1
    width = CONFIDENCE_KNOTS[knot + 1] - CONFIDENCE_KNOTS[knot]
    return knot, (confidence - CONFIDENCE_KNOTS[knot]) / width


@compiled
def update_rates(chances: Chances) -> None:
    """Shrink each cell towards all positions together, and those towards the confidence."""
    rates, seen, accepted = chances.rates, chances.seen, chances.accepted
    for knot in range(rates.shape[1]):
        pooled, weight = PRIOR_TOKENS * CONFIDENCE_KNOTS[knot], PRIOR_TOKENS
        for position in range(rates.shape[0]):
            pooled += accepted[position, knot]
            weight += seen[position, knot]
        pooled /= weight
        for position in range(rates.shape[0]):
            cell = accepted[position, knot] + POSITION_PRIOR_TOKENS * pooled
            rates[position, knot] = cell / (seen[position, knot] + POSITION_PRIOR_TOKENS)


@compiled
def expect(chances: Chances, rows: Ints, confidence: Floats, lengths: Ints) -> Floats:
    """Return survival of new drafts of D requests, corrected by their bias; store it uncorrected.

    Args:
        chances: chances of such drafts.
        rows: rows of the requests, [D].
        confidence: confidence of their drafts, [D, w].
        lengths: number of drafts of each request, [D]; survival after those is 0.
    """
    curves, overall = np.zeros(confidence.shape), chances.bias_of_all
    prior = overall[1] + BIAS_PRIOR_TOKENS
    prior = BIAS_PRIOR_TOKENS * (prior / (overall[0] + BIAS_PRIOR_TOKENS))
    for number in range(len(rows)):
        row, survival = rows[number], 1.0
        bias = (chances.bias[row, 1] + prior) / (chances.bias[row, 0] + BIAS_PRIOR_TOKENS)
        for position in range(lengths[number]):
            sure = confidence[number, position]
            knot, share = locate(sure)
            below, above = chances.rates[position, knot], chances.rates[position, knot + 1]
            survival *= below + share * (above - below)
            chances.confidence[row, position] = sure
            chances.survival[row, position] = survival
            curves[number, position] = min(survival * bias, 1.0)
    return curves


@compiled
def learn(chances: Chances, rows: Ints, verified: Ints, known: Ints, right: Ints) -> None:
    """Learn what became of the last drafts of R requests.

    The number of tokens that a step yields shows how easy they were. So where other drafts than
    these were verified, only the first one is learned from.

    Args:
        chances: chances of such drafts.
        rows: rows of the requests, [R].
        verified: drafts of each request that were verified, [R].
        known: drafts of each request of which it is known what became of them, [R].
        right: how many of those were right, up to the first wrong one, [R].
    """
    num_requests, num_verified = len(rows), chances.num_verified
    tried, compared = known.copy(), known.copy()
    num_tried = num_known = 0
    for request in range(num_requests):
        if known[request]:
            is_own = 0 < verified[request] <= num_verified[rows[request]]
            tried[request] = known[request] if is_own else 1
            compared[request] = verified[request] if is_own else 1
            # Every accepted token and the first rejected one were tried; later ones were not.
            num_tried += min(right[request] + 1, tried[request])
            num_known += 1
    for row in rows:  # drafts of other requests may still wait for their turn
        num_verified[row] = 0
    if not num_known:
        return
    fade = 0.5 ** (num_tried / HALF_LIFE_TOKENS)
    for position in range(len(chances.seen)):
        for knot in range(len(CONFIDENCE_KNOTS)):
            chances.seen[position, knot] *= fade
            chances.accepted[position, knot] *= fade
    overall, memory = chances.bias_of_all, GLOBAL_MEMORY**num_known
    overall[0], overall[1] = memory * overall[0], memory * overall[1]
    for request in range(num_requests):
        if not tried[request]:
            continue
        row, expected, came = rows[request], 0.0, min(right[request], tried[request])
        for position in range(min(came + 1, tried[request])):
            knot, share = locate(chances.confidence[row, position])
            chances.seen[position, knot] += 1.0 - share
            chances.seen[position, knot + 1] += share
            if position < came:
                chances.accepted[position, knot] += 1.0 - share
                chances.accepted[position, knot + 1] += share
        for position in range(compared[request]):
            expected += chances.survival[row, position]
        came = min(came, compared[request])
        bias = chances.bias[row]
        bias[0] = REQUEST_MEMORY * bias[0] + expected
        bias[1] = REQUEST_MEMORY * bias[1] + came
        overall[0] += expected
        overall[1] += came
    update_rates(chances)


def learn_blocks(chances: Chances, rows: Ints, verified: Ints, accepted: Ints) -> None:
    """Learn what became of the blocks of R requests: drafts verified and accepted, [R] each.

    Drafts that are not ours teach nothing: the scheduler pads some requests that it admits, or
    resumes after taking their drafts. Our drafts are verified in the next step.
    """
    is_own = verified <= chances.num_verified[rows]
    learn(chances, rows, verified, verified * is_own, accepted)


def expect_texts(chances: Chances, rows: Ints, matches: Ints, lengths: Ints) -> Floats:
    """Return survival of what R requests' texts predict after matches of so many tokens, [R, F]; 0
    after a prediction's end. Stores it as `expect` does."""
    behind = matches[:, None] + np.arange(len(chances.rates))
    return expect(chances, rows, TRUST[np.minimum(behind, len(TRUST) - 1)], lengths)
