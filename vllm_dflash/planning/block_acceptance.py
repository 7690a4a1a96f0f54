"""How likely drafted blocks are to be accepted, request by request."""

from __future__ import annotations

import numpy as np

from vllm_dflash.planning import Floats, Ints
from vllm_dflash.planning.compiled import compiled
from vllm_dflash.planning.survival import (
    Bias,
    Calibration,
    biases,
    learn_outcomes,
    survival_curves,
    survival_of,
)

FIRST_SURVIVAL_RATE = 0.5
FIRST_SURVIVAL_FADE = 0.05
"""Share of the way to everybody's first survival that a request goes with each planned step."""


@compiled
def learn_acceptance(
    calibration: tuple[Floats, Floats, Floats],
    bias: tuple[Floats, Floats],
    drafts: tuple[Floats, Floats],
    num_drafts: Ints,
    rows: Ints,
    verified: Ints,
    accepted: Ints,
) -> None:
    """All that drafts which were verified have to teach, in one call.

    Args:
        calibration: its `seen`, `accepted` and `rates`.
        bias: of `requests` and of `everybody`.
        drafts: confidence and survival of each request's last drafts, [rows, K] each.
        num_drafts: how many of those were to be verified, [rows]; none from then on.
        rows: of the requests, [R].
        verified: drafts of each, [R].
        accepted: of those, [R].
    """
    confidence, survival = drafts
    max_draft = confidence.shape[1]
    known, count = np.empty(len(rows), dtype=np.int64), 0
    for request in range(len(rows)):
        # Drafts that are not ours have nothing to teach: the scheduler pads with some whom it
        # admits, or resumes after it took their drafts. Ours are verified in the next step.
        if 0 < verified[request] <= num_drafts[rows[request]]:
            known[count] = request
            count += 1
    blocks = np.empty((count, max_draft))
    expected = np.zeros(count)
    known_rows, of_those = np.empty(count, dtype=np.int64), np.empty((2, count), dtype=np.int64)
    for number in range(count):
        request = known[number]
        row = known_rows[number] = rows[request]
        of_those[0, number], of_those[1, number] = verified[request], accepted[request]
        for position in range(max_draft):
            blocks[number, position] = confidence[row, position]
            if position < verified[request]:
                expected[number] += survival[row, position]
    num_drafts[:] = 0
    if count:
        tried = of_those[0], of_those[1]
        learn_outcomes(calibration, bias, known_rows, blocks, tried, (expected, of_those[1]))


@compiled
def fade(first_survival: Floats, rows: Ints, mean: float) -> Floats:
    """Move requests' first survival towards everybody's; returns theirs, [R]."""
    first = np.empty(len(rows))
    for number in range(len(rows)):
        row = rows[number]
        first_survival[row] += FIRST_SURVIVAL_FADE * (mean - first_survival[row])
        first[number] = first_survival[row]
    return first


@compiled
def expect(
    rates: Floats,
    bias: Floats,
    everybody: Floats,
    first_survival: Floats,
    confidences: Floats,
    survivals: Floats,
    rows: Ints,
    confidence: Floats,
) -> tuple[Floats, Floats]:
    """What is expected of drafts, written into the planner's tables.

    Args:
        rates: of the calibration, [K, knots].
        bias, everybody: of the `Bias`.
        first_survival, confidences, survivals: the tables.
        rows: of the D requests that were drafted, in those.
        confidence: of their drafts, [D, w].

    Returns:
        Their first survival as it was, [D], and the survival of their drafts, [D, w].
    """
    survival = survival_of(rates, confidence)
    curves = survival_curves(survival, biases(bias, everybody, rows))
    before = np.empty(len(rows))
    for number in range(len(rows)):
        row = rows[number]
        before[number] = first_survival[row]
        first_survival[row] += FIRST_SURVIVAL_RATE * (curves[number, 0] - before[number])
        for position in range(survival.shape[1]):
            confidences[row, position] = confidence[number, position]
            survivals[row, position] = survival[number, position]
    return before, curves


class BlockAcceptance:
    """What is known of drafted blocks: of all together, and of those of each request."""

    def __init__(self, max_draft: int, num_rows: int) -> None:
        """For blocks of up to `max_draft` drafts (K), and tables of so many requests."""
        self.calibration = Calibration(max_draft)
        self.bias = Bias(num_rows)
        self._first_survival = np.zeros(num_rows)
        """How likely each request's first draft has been to be accepted, lately."""
        # The drafts that the next step may verify, and how many of each request's.
        self._confidence = np.zeros((num_rows, max_draft))
        self._survival = np.zeros((num_rows, max_draft))
        self._num_drafts = np.zeros(num_rows, dtype=np.int64)
        self._has_drafts = False

    def forget(self, rows: Ints, mean_first_survival: float) -> None:
        """Rows that are new requests' from now on, of whom nothing else is known."""
        self._first_survival[rows] = mean_first_survival
        self._num_drafts[rows] = 0
        self.bias.forget(rows)

    def learn(self, rows: Ints, verified: Ints, accepted: Ints) -> None:
        """What became of the drafts of R requests that were verified, [R] each."""
        if not self._has_drafts:
            return
        self._has_drafts = False
        learn_acceptance(
            (self.calibration.seen, self.calibration.accepted, self.calibration.rates),
            (self.bias.requests, self.bias.everybody),
            (self._confidence, self._survival),
            self._num_drafts,
            rows,
            verified,
            accepted,
        )

    def first_survival(self, rows: Ints, mean: float) -> Floats:
        """Of each request, [R]; step by step it comes nearer to everybody's."""
        return fade(self._first_survival, rows, mean)

    def expect(self, rows: Ints, confidence: Floats) -> tuple[Floats, Floats]:
        """First survival as it was, [D], and survival of new blocks, [D, w]; see `expect`."""
        return expect(
            self.calibration.rates,
            self.bias.requests,
            self.bias.everybody,
            self._first_survival,
            self._confidence,
            self._survival,
            rows,
            confidence,
        )

    def verify(self, rows: Ints, lengths: Ints) -> None:
        """So many drafts of these requests go on to be verified, [R]."""
        self._num_drafts[rows] = lengths
        self._has_drafts = True
