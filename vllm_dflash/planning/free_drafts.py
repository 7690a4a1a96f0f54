"""What free drafts are worth: how likely they are to be accepted, and what verifying them brings.

A match of m tokens of which j drafts came true has become one of m + j. So how far the text has
matched up to a draft is its confidence, which is calibrated as a drafter's is. Whether they would
be accepted is known of all of them a step later, verified or not: the target has gone on by then.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_dflash.planning import Floats, Ints, Records
from vllm_dflash.planning.compiled import compiled
from vllm_dflash.planning.curves import seconds_at
from vllm_dflash.planning.forecast import THRESHOLDS
from vllm_dflash.planning.step import Foretold
from vllm_dflash.planning.survival import (
    Bias,
    Calibration,
    biases,
    learn_outcomes,
    survival_curves,
    survival_of,
)
from vllm_dflash.planning.work import Work, decoding_seconds, level_of, plain_seconds

TRUST = 1.0 - 0.78 * np.maximum(np.arange(512.0), 1.0) ** -0.76
"""Confidence in the token behind a match of so many tokens: of source code, 46% of them are wrong
behind a match of 2, and 16% behind one of 8."""
AGREEMENT = 8
"""Tokens of a match that a drafter's token, made independently, is worth where it is the same."""


@compiled
def confidences(matches: Ints, width: int) -> Floats:
    """Of the drafts behind matches [D], [D, w]."""
    found = np.empty((len(matches), width))
    for request in range(len(matches)):
        for position in range(width):
            found[request, position] = TRUST[min(matches[request] + position, len(TRUST) - 1)]
    return found


class FreeTables(NamedTuple):
    """What is known of free drafts, by rows of requests; the arrays of a `FreeAcceptance`."""

    calibration: tuple[Floats, Floats, Floats]
    """Its `seen`, `accepted` and `rates`."""
    bias: tuple[Floats, Floats]
    """Of `requests` and of `everybody`."""
    matches: Ints
    """Of the last look-up, [rows]."""
    survival: Floats
    """Of its drafts, [rows, F]."""
    num_verified: Ints
    """How many of those were to be verified, [rows]."""


@compiled
def learn_free(tables: FreeTables, rows: Ints, verified: Ints, foretold: Foretold) -> None:
    """What has become of the last look-up.

    Args:
        tables: to write it into.
        rows: of the requests, [R].
        verified: drafts of each, whosesoever, [R].
        foretold: the new look-up, which knows.
    """
    survival, num_verified = tables.survival, tables.num_verified
    count = (foretold.known > 0).sum()
    if not count:
        return
    known = np.empty((2, count), np.int64)  # what is known of each, and how much came true
    matches, known_rows = np.empty(count, np.int64), np.empty(count, np.int64)
    expected, true_ones = np.zeros(count), np.empty(count, np.int64)
    number = 0
    for request in range(len(rows)):
        if not foretold.known[request]:
            continue
        row = known_rows[number] = rows[request]
        matches[number] = tables.matches[row]
        # How many tokens a step has got says how easy they were; so where the drafts were not
        # verified themselves, only the first one tells.
        compared = tells = 1
        if 0 < verified[request] <= num_verified[row]:
            compared, tells = verified[request], foretold.known[request]
        known[0, number] = tells
        known[1, number] = min(foretold.came_true[request], tells)
        true_ones[number] = min(known[1, number], compared)
        for position in range(compared):
            expected[number] += survival[row, position]
        number += 1
    blocks = confidences(matches, survival.shape[1])
    tried = known[0], known[1]
    came = expected, true_ones
    learn_outcomes(tables.calibration, tables.bias, known_rows, blocks, tried, came)


@compiled
def free_curves(tables: FreeTables, rows: Ints, matches: Ints, lengths: Ints) -> Floats:
    """Survival of the drafts of each request, 0 behind their end, [R, F]; written down, too."""
    survival, bias = tables.survival, tables.bias
    curves = np.zeros((len(rows), survival.shape[1]))
    one = np.empty(1, np.int64)
    for request in range(len(rows)):
        if not lengths[request]:
            continue
        row, length = rows[request], lengths[request]
        one[0], tables.matches[row] = row, matches[request]
        found = survival_of(
            tables.calibration[2], confidences(matches[request : request + 1], length)
        )
        survival[row, :length] = found[0]
        curves[request, :length] = survival_curves(found, biases(bias[0], bias[1], one))[0]
    return curves


class FreeOutcomes(NamedTuple):
    """What verifying free drafts would bring, for each threshold of survival."""

    kept: Floats
    """Drafts of each request that survive with so much, [R, T]."""
    gain: Floats
    """Of those, drafts that will be accepted, [R, T]."""


@compiled
def outcomes_of_free(curves: Floats) -> FreeOutcomes:
    """Of drafts with this survival, [R, F]."""
    num_requests, num_thresholds = len(curves), len(THRESHOLDS)
    kept, gain = np.zeros((num_requests, num_thresholds)), np.zeros((num_requests, num_thresholds))
    for request in range(num_requests):
        for threshold in range(num_thresholds):
            for position in range(curves.shape[1]):
                survival = curves[request, position]
                if survival < THRESHOLDS[threshold] or survival == 0.0:
                    break  # it never grows
                kept[request, threshold] += 1.0
                gain[request, threshold] += survival
    return FreeOutcomes(kept, gain)


class Rest(NamedTuple):
    """The best step in which the drafter rests."""

    rate: float
    """Tokens per second."""
    plain_rate: float
    """The same, if it verifies nothing."""
    plain_seconds: float
    row_seconds: float
    """What one more row takes."""


@compiled
def expect_free(
    tables: FreeTables, rows: Ints, verified: Ints, foretold: Foretold
) -> tuple[Floats, FreeOutcomes]:
    """Learn from the last look-up, see `learn_free`, then say what the new one promises.

    Returns:
        Survival of its drafts, [R, F], and what comes of verifying them; of nobody, [0, F], where
        there are none.
    """
    learn_free(tables, rows, verified, foretold)
    for row in rows:
        tables.num_verified[row] = 0
    curves: Floats = np.zeros((0, tables.survival.shape[1]))
    if foretold.lengths.any():
        curves = free_curves(tables, rows, foretold.matches, foretold.lengths)
    return curves, outcomes_of_free(curves)


NO_FREE = FreeOutcomes(*np.zeros((2, 0, len(THRESHOLDS))))
"""Of a step that knows of no free drafts."""


@compiled
def best_rest(records: Records, num_requests: int, context_lens: Ints, free: FreeOutcomes) -> Rest:
    """Without the drafter: how many free drafts are best verified, and what comes of it."""
    costs, context = records[0], float(context_lens.sum())
    plain = plain_seconds(costs, num_requests, context)
    level = level_of(costs, num_requests, True)
    plain_rate = best = num_requests / plain
    best_rows = float(num_requests)
    for threshold in range(len(THRESHOLDS)):
        drafts, reading, tokens = 0.0, 0.0, float(num_requests)
        for request in range(len(free.kept)):
            drafts += free.kept[request, threshold]
            reading += free.kept[request, threshold] * context_lens[request]
            tokens += free.gain[request, threshold]
        if not drafts:
            break  # and none at a higher one
        rows = num_requests + drafts
        work = Work(num_requests, rows, context, reading, 0.0, 0.0, 0.0)
        rate = tokens / decoding_seconds(costs, work, level)
        if rate > best:
            best, best_rows = rate, rows
    row = seconds_at(costs.verify, best_rows + 1.0) - seconds_at(costs.verify, best_rows)
    return Rest(best, plain_rate, plain, max(row, 0.0))


class FreeAcceptance:
    """What is known of free drafts: of all together, and of those of each request."""

    def __init__(self, max_draft: int, num_rows: int) -> None:
        """For up to `max_draft` (F) of them, and tables of so many requests."""
        self.calibration = Calibration(max_draft)
        self.bias = Bias(num_rows)
        self.tables = FreeTables(
            (self.calibration.seen, self.calibration.accepted, self.calibration.rates),
            (self.bias.requests, self.bias.everybody),
            np.zeros(num_rows, np.int64),
            np.zeros((num_rows, max_draft)),
            np.zeros(num_rows, np.int64),
        )

    def forget(self, rows: Ints) -> None:
        """Rows that are new requests' from now on."""
        self.bias.forget(rows)
        self.tables.num_verified[rows] = 0

    def verify(self, rows: Ints, lengths: Ints) -> None:
        """So many drafts of these requests go on to be verified, [D]."""
        self.tables.num_verified[rows] = lengths
