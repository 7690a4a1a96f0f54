"""How likely drafts are to be accepted, learned: of blocks, and of what texts predict.

A draft's confidence is calibrated by what became of earlier ones, position by position; how much
better or worse a request's drafts do than that is its bias. A block's confidence is the drafter's.
That of a text is how far it has matched up to the draft: a match of m tokens of which j drafts came
true has become one of m + j. Whether a text's drafts would be accepted is known of all of them a
step later, verified or not: the target has gone on by then.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_dflash.planning import Floats, Ints
from vllm_dflash.planning.compiled import compiled

CONFIDENCE_KNOTS = np.array([0.0, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96, 0.99, 1.0])
PRIOR_TOKENS = 4.0
"""Observations the drafter's own word is worth."""
POSITION_PRIOR_TOKENS = 8.0
"""Observations that all positions together are worth to each."""
BIAS_PRIOR_TOKENS = 8.0
HALF_LIFE_TOKENS = 2000.0
"""Observed drafts after which an observation counts half."""
RECALLED_TOKENS = 500.0
"""Observations that all of an earlier run count for: its prompts may have been other ones, so a few
hundred drafts of this run weigh as much."""
REQUEST_MEMORY, GLOBAL_MEMORY = 0.9, 0.98
"""What is left of a request's, and of everybody's, bias after one more observed draft block."""
TRUST = 1.0 - 0.78 * np.maximum(np.arange(512.0), 1.0) ** -0.76
"""Confidence in the token behind a match of so many tokens: of source code, 46% of them are wrong
behind a match of 2, and 16% behind one of 8."""
AGREEMENT = 8
"""Tokens of a match that a drafter's token, made independently, is worth where it is the same."""


class Chances(NamedTuple):
    """What is known of one kind of drafts: arrays that are written, by rows of requests.

    Acceptance of a draft, given that those before it were accepted, is a table over position and
    confidence, linear between knots. Its cells shrink to all positions together, and those to the
    drafter's own word. A bias is a ratio of decayed counts: a request's shrinks to everybody's,
    which is where a new request starts, and everybody's to one.
    """

    seen: Floats
    """Drafts by position and confidence, [K, knots]; old ones fade."""
    accepted: Floats
    """Accepted ones among them."""
    rates: Floats
    """What follows from both."""
    bias: Floats
    """Tokens expected and accepted of late, of each request, [rows, 2]."""
    bias_of_all: Floats
    """[2]."""
    confidence: Floats
    """Confidence of each request's last drafts, [rows, K]."""
    survival: Floats
    """Chance that each of those and all before it are accepted, not corrected by bias."""
    num_verified: Ints
    """How many of them are to be verified in the next step, [rows]."""

    @classmethod
    def of(cls, max_draft: int, num_rows: int) -> Chances:
        """Chances of up to `max_draft` drafts (K), of which nothing is known yet."""
        seen, accepted, rates = np.zeros((3, max_draft, len(CONFIDENCE_KNOTS)))
        confidence, survival = np.zeros((2, num_rows, max_draft))
        num_verified = np.zeros(num_rows, np.int64)
        bias = np.zeros((num_rows, 2))
        made = cls(seen, accepted, rates, bias, np.zeros(2), confidence, survival, num_verified)
        update_rates(made)
        return made

    def forget(self, rows: Ints) -> None:
        """Rows that are new requests' from now on."""
        self.bias[rows] = 0.0
        self.num_verified[rows] = 0

    def acceptance(self, confidence: Floats) -> Floats:
        """Chances of drafts of such confidence, given those before them, [D, w] each."""
        columns = zip(self.rates, confidence.T, strict=False)
        return np.stack([np.interp(sure, CONFIDENCE_KNOTS, rates) for rates, sure in columns], 1)

    def compared(self, confidence: Floats, verified: Ints, accepted: Ints) -> Floats:
        """Drafts of R requests that were accepted, that were expected to be, and the variance of
        that, [3]; confidence: [R, K]."""
        rates, places = self.acceptance(confidence), np.arange(confidence.shape[1])
        tried = places < np.minimum(accepted + 1, verified)[:, None]  # [R, K]
        variance = (tried * rates * (1.0 - rates)).sum()
        return np.array([accepted.sum(), (tried * rates).sum(), variance])

    def keep(self, tokens: float) -> None:
        """Let all observations count for no more than so many."""
        share = tokens / max(float(self.seen.sum()), tokens)
        self.seen[:] *= share
        self.accepted[:] *= share
        update_rates(self)

    def recall(self, table: Floats) -> None:
        """Start from what another run has seen, and what of it was accepted, [2, K, knots]."""
        self.seen[:], self.accepted[:] = table
        self.keep(RECALLED_TOKENS)


@compiled
def locate(confidence: float) -> tuple[int, float]:
    """The knot below a confidence, and how far it is to the next, in [0, 1]."""
    knot = 0
    while knot < len(CONFIDENCE_KNOTS) - 2 and confidence >= CONFIDENCE_KNOTS[knot + 1]:
        knot += 1
    width = CONFIDENCE_KNOTS[knot + 1] - CONFIDENCE_KNOTS[knot]
    return knot, (confidence - CONFIDENCE_KNOTS[knot]) / width


@compiled
def update_rates(chances: Chances) -> None:
    """Shrink each cell to all positions together, and those to the drafter's own word."""
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
    """Survival of new drafts of D requests, by their bias as well; written down without it.

    Args:
        chances: of such drafts.
        rows: of the requests, [D].
        confidence: of their drafts, [D, w].
        lengths: how many each has, [D]; survival behind those is 0.
    """
    curves, everybody = np.zeros(confidence.shape), chances.bias_of_all
    prior = everybody[1] + BIAS_PRIOR_TOKENS
    prior = BIAS_PRIOR_TOKENS * (prior / (everybody[0] + BIAS_PRIOR_TOKENS))
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
    """What became of the last drafts of R requests.

    How many tokens a step has got says how easy they were; so where other drafts were verified than
    these, only the first one tells.

    Args:
        chances: of such drafts.
        rows: of the requests, [R].
        verified: drafts of each that were verified, whosesoever, [R].
        known: drafts of each of which it is known what became of them, [R].
        right: of those, how many first ones were right, [R].
    """
    num_requests, num_verified = len(rows), chances.num_verified
    tried, compared = known.copy(), known.copy()
    num_tried = num_known = 0
    for request in range(num_requests):
        if known[request]:
            is_own = 0 < verified[request] <= num_verified[rows[request]]
            tried[request] = known[request] if is_own else 1
            compared[request] = verified[request] if is_own else 1
            # Every accepted token and the first rejected one were tried; those behind were not.
            num_tried += min(right[request] + 1, tried[request])
            num_known += 1
    for row in rows:  # of others, drafts may still wait for their turn
        num_verified[row] = 0
    if not num_known:
        return
    fade = 0.5 ** (num_tried / HALF_LIFE_TOKENS)
    for position in range(len(chances.seen)):
        for knot in range(len(CONFIDENCE_KNOTS)):
            chances.seen[position, knot] *= fade
            chances.accepted[position, knot] *= fade
    everybody, memory = chances.bias_of_all, GLOBAL_MEMORY**num_known
    everybody[0], everybody[1] = memory * everybody[0], memory * everybody[1]
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
        everybody[0] += expected
        everybody[1] += came
    update_rates(chances)


def learn_blocks(chances: Chances, rows: Ints, verified: Ints, accepted: Ints) -> None:
    """What became of the blocks of R requests: drafts verified and accepted, [R] each.

    Drafts that are not ours have nothing to teach: the scheduler pads with some whom it admits, or
    resumes after it took their drafts. Ours are verified in the next step.
    """
    is_own = verified <= chances.num_verified[rows]
    learn(chances, rows, verified, verified * is_own, accepted)


def expect_texts(chances: Chances, rows: Ints, matches: Ints, lengths: Ints) -> Floats:
    """Survival of what the texts of R requests predict, behind matches of so many tokens, 0 behind
    its end, [R, F]; written down as `expect` does."""
    behind = matches[:, None] + np.arange(len(chances.rates))
    return expect(chances, rows, TRUST[np.minimum(behind, len(TRUST) - 1)], lengths)
