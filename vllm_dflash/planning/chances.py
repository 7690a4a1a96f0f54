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
from vllm_dflash.planning.step import Predicted

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
    """Of those."""
    rates: Floats
    """What follows from both."""
    bias: Floats
    """Tokens expected and accepted of late, of each request, [rows, 2]."""
    bias_of_all: Floats
    """[2]."""
    confidence: Floats
    """Of each request's last drafts, [rows, K]."""
    survival: Floats
    """Chance that each of those and all before it are accepted, not corrected by bias."""
    num_verified: Ints
    """How many of them were to be verified, [rows]."""

    @classmethod
    def of(cls, max_draft: int, num_rows: int) -> Chances:
        """Of up to `max_draft` drafts (K), of which nothing is known yet."""
        seen, accepted, rates = np.zeros((3, max_draft, len(CONFIDENCE_KNOTS)))
        confidence, survival = np.zeros((2, num_rows, max_draft))
        num_verified = np.zeros(num_rows, np.int64)
        bias = np.zeros((num_rows, 2))
        made = cls(seen, accepted, rates, bias, np.zeros(2), confidence, survival, num_verified)
        update_rates(rates, seen, accepted)
        return made

    def forget(self, rows: Ints) -> None:
        """Rows that are new requests' from now on."""
        self.bias[rows] = 0.0
        self.num_verified[rows] = 0

    def bias_of(self, rows: Ints) -> Floats:
        """Accepted against expected tokens of some requests, [D]."""
        return biases(self, rows)

    def acceptance(self, confidence: Floats) -> Floats:
        """Of drafts of such confidence, given those before them, [D, w] each."""
        columns = zip(self.rates, confidence.T, strict=False)
        return np.stack([np.interp(sure, CONFIDENCE_KNOTS, rates) for rates, sure in columns], 1)

    def keep(self, tokens: float) -> None:
        """Let all observations count for no more than so many."""
        share = min(1.0, tokens / max(float(self.seen.sum()), tokens))
        self.seen[:] *= share
        self.accepted[:] *= share
        update_rates(self.rates, self.seen, self.accepted)

    def recall(self, seen: Floats, accepted: Floats) -> None:
        """Start from what another run has seen, at most `RECALLED_TOKENS` of it."""
        self.seen[:], self.accepted[:] = seen, accepted
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
def update_rates(rates: Floats, seen: Floats, accepted: Floats) -> None:
    """Shrink each cell to all positions together, and those to the drafter's own word."""
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
def rate_at(rates: Floats, confidence: float) -> float:
    """Acceptance at a confidence: linear between the knots of a row of a table, [knots]."""
    knot, share = locate(confidence)
    return rates[knot] + share * (rates[knot + 1] - rates[knot])


@compiled
def count_outcome(seen: Floats, accepted: Floats, confidence: float, is_right: bool) -> None:
    """Add a draft of such confidence to a row of a table, [knots] each."""
    knot, share = locate(confidence)
    seen[knot] += 1.0 - share
    seen[knot + 1] += share
    if is_right:
        accepted[knot] += 1.0 - share
        accepted[knot + 1] += share


@compiled
def biases(chances: Chances, rows: Ints) -> Floats:
    """Accepted against expected tokens of some requests, [D]."""
    expected, accepted = chances.bias_of_all + BIAS_PRIOR_TOKENS
    prior = BIAS_PRIOR_TOKENS * (accepted / expected)
    found = np.empty(len(rows))
    for number, row in enumerate(rows):
        found[number] = (chances.bias[row, 1] + prior) / (chances.bias[row, 0] + BIAS_PRIOR_TOKENS)
    return found


@compiled
def expect(chances: Chances, rows: Ints, confidence: Floats, lengths: Ints) -> Floats:
    """Survival of new drafts of D requests, by their bias as well; written down without it.

    Args:
        chances: of such drafts.
        rows: of the requests, [D].
        confidence: of their drafts, [D, w].
        lengths: how many each has, [D]; survival behind those is 0.
    """
    curves, bias = np.zeros(confidence.shape), biases(chances, rows)
    for number in range(len(rows)):
        row, survival = rows[number], 1.0
        for position in range(lengths[number]):
            sure = confidence[number, position]
            survival *= rate_at(chances.rates[position], sure)
            chances.confidence[row, position] = sure
            chances.survival[row, position] = survival
            curves[number, position] = min(survival * bias[number], 1.0)
    return curves


@compiled
def learn(
    chances: Chances, rows: Ints, tried: Ints, right: Ints, compared: Ints, came: Ints
) -> None:
    """What became of the last drafts of R requests.

    Args:
        chances: of such drafts.
        rows: of the requests, [R].
        tried: drafts of each whose fate is known, [R]; 0: nothing is known.
        right: of those, how many first ones were accepted, [R].
        compared: drafts of each that were expected to bring as many tokens as came, [R].
        came: tokens that did, [R].
    """
    seen, accepted = chances.seen, chances.accepted
    num_tried = num_known = 0
    for request in range(len(rows)):
        if tried[request]:
            # Every accepted token and the first rejected one were tried; those behind were not.
            num_tried += min(right[request] + 1, tried[request])
            num_known += 1
    if not num_known:
        return
    fade = 0.5 ** (num_tried / HALF_LIFE_TOKENS)
    seen *= fade
    accepted *= fade
    chances.bias_of_all[:] *= GLOBAL_MEMORY**num_known
    for request in range(len(rows)):
        if not tried[request]:
            continue
        row, expected = rows[request], 0.0
        for position in range(min(right[request] + 1, tried[request])):
            sure, is_right = chances.confidence[row, position], position < right[request]
            count_outcome(seen[position], accepted[position], sure, is_right)
        for position in range(compared[request]):
            expected += chances.survival[row, position]
        for bias, memory in ((chances.bias[row], REQUEST_MEMORY), (chances.bias_of_all, 1.0)):
            bias[0] = memory * bias[0] + expected
            bias[1] = memory * bias[1] + came[request]
    update_rates(chances.rates, seen, accepted)


@compiled
def learn_blocks(chances: Chances, rows: Ints, verified: Ints, accepted: Ints) -> None:
    """What became of the blocks of R requests: drafts verified and accepted, [R] each."""
    tried = verified.copy()
    for request in range(len(rows)):
        # Drafts that are not ours have nothing to teach: the scheduler pads with some whom it
        # admits, or resumes after it took their drafts. Ours are verified in the next step.
        tried[request] *= verified[request] <= chances.num_verified[rows[request]]
    chances.num_verified[:] = 0
    learn(chances, rows, tried, accepted, verified, accepted)


@compiled
def learn_texts(chances: Chances, rows: Ints, verified: Ints, predicted: Predicted) -> None:
    """What has become of what the texts of R requests predicted.

    Args:
        chances: of texts.
        rows: of the requests, [R].
        verified: drafts of each, whosesoever, [R].
        predicted: the new look-up, which knows.
    """
    tried, right, compared, came = np.zeros((4, len(rows)), np.int64)
    for request in range(len(rows)):
        if not predicted.known[request]:
            continue
        # How many tokens a step has got says how easy they were; so where the drafts were not
        # verified themselves, only the first one tells.
        compared[request] = tried[request] = 1
        if 0 < verified[request] <= chances.num_verified[rows[request]]:
            compared[request], tried[request] = verified[request], predicted.known[request]
        right[request] = min(predicted.came_true[request], tried[request])
        came[request] = min(right[request], compared[request])
    learn(chances, rows, tried, right, compared, came)


@compiled
def expect_texts(chances: Chances, rows: Ints, matches: Ints, lengths: Ints) -> Floats:
    """Survival of what the texts of R requests predict, behind matches of so many tokens, 0 behind
    its end, [R, F]; written down as `expect` does."""
    confidence = np.zeros((len(rows), chances.rates.shape[0]))
    for request in range(len(rows)):
        for position in range(lengths[request]):
            confidence[request, position] = TRUST[min(matches[request] + position, len(TRUST) - 1)]
    return expect(chances, rows, confidence, lengths)


@compiled
def follow_texts(chances: Chances, rows: Ints, verified: Ints, predicted: Predicted) -> Floats:
    """Learn from the last look-up, see `learn_texts`, then say what the new one promises: survival
    of its drafts, [R, F]; of nobody, [0, F], where there are none."""
    learn_texts(chances, rows, verified, predicted)
    for row in rows:
        chances.num_verified[row] = 0
    if not predicted.lengths.any():
        return np.zeros((0, chances.rates.shape[0]))
    return expect_texts(chances, rows, predicted.matches, predicted.lengths)
