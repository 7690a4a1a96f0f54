"""How likely drafts are to be accepted: from the drafter's confidence and from what became of
earlier ones."""

from __future__ import annotations

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


@compiled
def acceptance_of(rates: Floats, confidence: Floats) -> Floats:
    """Linear between the knots of each position: rates [K, knots], confidence [D, w] to [D, w]."""
    found = np.empty(confidence.shape)
    for request in range(confidence.shape[0]):
        for position in range(confidence.shape[1]):
            knot, share = locate(confidence[request, position])
            low = rates[position, knot]
            found[request, position] = low + share * (rates[position, knot + 1] - low)
    return found


@compiled
def survival_of(rates: Floats, confidence: Floats) -> Floats:
    """Chance that each draft and all before it are accepted, as `acceptance_of`; not yet corrected
    by a bias."""
    survival = acceptance_of(rates, confidence)
    for request in range(survival.shape[0]):
        for position in range(1, survival.shape[1]):
            survival[request, position] *= survival[request, position - 1]
    return survival


@compiled
def learn_outcomes(
    calibration: tuple[Floats, Floats, Floats],
    bias: tuple[Floats, Floats],
    rows: Ints,
    confidence: Floats,
    tried: tuple[Ints, Ints],
    compared: tuple[Floats, Ints],
) -> None:
    """What became of blocks of some requests, for their calibration and their bias.

    Args:
        calibration: its `seen`, `accepted` and `rates`.
        bias: of `requests` and of `everybody`.
        rows: of the requests, [D].
        confidence: of their drafts, [D, w].
        tried: drafts of each whose fate is known, and those of them that were accepted, [D] each.
        compared: tokens that were expected of each, and that came, [D] each.
    """
    seen, accepted, rates = calibration
    learn_fates(seen, accepted, confidence, tried[0], tried[1])
    update_rates(rates, seen, accepted)
    learn_biases(bias[0], bias[1], rows, compared[0], compared[1])


@compiled
def locate(confidence: float) -> tuple[int, float]:
    """The knot below a confidence, and how far it is to the next, in [0, 1]."""
    knot = 0
    while knot < len(CONFIDENCE_KNOTS) - 2 and confidence >= CONFIDENCE_KNOTS[knot + 1]:
        knot += 1
    width = CONFIDENCE_KNOTS[knot + 1] - CONFIDENCE_KNOTS[knot]
    return knot, (confidence - CONFIDENCE_KNOTS[knot]) / width


@compiled
def learn_fates(
    seen: Floats, accepted: Floats, confidence: Floats, drafted: Ints, num_accepted: Ints
) -> None:
    """Add blocks to the tables, [K, knots] each; see `Calibration.observe`."""
    num_tried = 0
    for request in range(len(drafted)):
        num_tried += min(num_accepted[request] + 1, drafted[request])
    fade = 0.5 ** (num_tried / HALF_LIFE_TOKENS)
    for position in range(seen.shape[0]):
        for knot in range(seen.shape[1]):
            seen[position, knot] *= fade
            accepted[position, knot] *= fade
    for request in range(len(drafted)):
        for position in range(min(num_accepted[request] + 1, drafted[request])):
            knot, share = locate(confidence[request, position])
            seen[position, knot] += 1.0 - share
            seen[position, knot + 1] += share
            if position < num_accepted[request]:
                accepted[position, knot] += 1.0 - share
                accepted[position, knot + 1] += share


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
        self.rates = np.zeros(shape)
        self._update_rates()

    def acceptance(self, confidence: Floats) -> Floats:
        """Conditional acceptance probability of each draft, [D, w] to [D, w]."""
        return acceptance_of(self.rates, np.asarray(confidence, dtype=np.float64))

    def observe(self, confidence: Floats, drafted: Ints, accepted: Ints) -> None:
        """Learn from blocks [D, w] of which `drafted` tokens were verified, `accepted` accepted.

        Every accepted token and the first rejected one were tried; those behind it were not.
        """
        learn_fates(self.seen, self.accepted, confidence, drafted, accepted)
        self._update_rates()

    def keep(self, tokens: float) -> None:
        """Let all observations count for no more than so many."""
        share = min(1.0, tokens / max(float(self.seen.sum()), tokens))
        self.seen *= share
        self.accepted *= share
        self._update_rates()

    def recall(self, seen: Floats, accepted: Floats, tokens: float = RECALLED_TOKENS) -> None:
        """Start from what another run has seen, which counts for so many observations."""
        self.seen[:], self.accepted[:] = seen, accepted
        self.keep(tokens)

    def _update_rates(self) -> None:
        update_rates(self.rates, self.seen, self.accepted)


@compiled
def bias_of_everybody(everybody: Floats) -> float:
    """Accepted against expected tokens of recent drafts, [2], shrunk to one."""
    return (everybody[1] + BIAS_PRIOR_TOKENS) / (everybody[0] + BIAS_PRIOR_TOKENS)


@compiled
def biases(requests: Floats, everybody: Floats, rows: Ints) -> Floats:
    """Accepted against expected tokens of some requests, [D]; see `Bias`."""
    prior = BIAS_PRIOR_TOKENS * bias_of_everybody(everybody)
    found = np.empty(len(rows))
    for number, row in enumerate(rows):
        found[number] = (requests[row, 1] + prior) / (requests[row, 0] + BIAS_PRIOR_TOKENS)
    return found


@compiled
def learn_biases(
    requests: Floats, everybody: Floats, rows: Ints, expected: Floats, accepted: Ints
) -> None:
    """Add verified blocks of some requests: tokens expected and accepted, [D] each."""
    memory = GLOBAL_MEMORY ** len(rows)
    everybody[0] *= memory
    everybody[1] *= memory
    for number in range(len(rows)):
        row = rows[number]
        requests[row, 0] = REQUEST_MEMORY * requests[row, 0] + expected[number]
        requests[row, 1] = REQUEST_MEMORY * requests[row, 1] + accepted[number]
        everybody[0] += expected[number]
        everybody[1] += accepted[number]


class Bias:
    """How many more tokens are accepted than expected, per request and for all.

    A ratio of decayed counts. A request's shrinks to everybody's, which is where a new request
    starts, and everybody's to one.
    """

    def __init__(self, num_rows: int) -> None:
        self.requests = np.zeros((num_rows, 2))
        """Expected and accepted tokens of each."""
        self.everybody = np.zeros(2)

    def forget(self, rows: Ints) -> None:
        """Rows that are new requests' from now on."""
        self.requests[rows] = 0.0

    def of_everybody(self) -> float:
        """Accepted against expected tokens over recent drafts."""
        return bias_of_everybody(self.everybody)

    def of(self, rows: Ints) -> Floats:
        """Accepted against expected tokens of each request, [D]."""
        return biases(self.requests, self.everybody, rows)

    def observe(self, rows: Ints, expected: Floats, accepted: Ints) -> None:
        """Learn from verified blocks of D requests: tokens expected and accepted, [D] each."""
        learn_biases(self.requests, self.everybody, rows, expected, accepted)


@compiled
def survival_curves(survival: Floats, bias: Floats) -> Floats:
    """Correct survival probabilities [D, w] by the bias of each request [D]; at most 1."""
    curves = np.empty(survival.shape)
    for request in range(survival.shape[0]):
        for position in range(survival.shape[1]):
            curves[request, position] = min(survival[request, position] * bias[request], 1.0)
    return curves
