"""How many places drafts get in a step, on Model Runner V2: the search for the best rate.

Where the device trims drafts, all requests get places for what they can use, and the best threshold
of survival tells what a step will verify. Where it does not, drafts are verified as given.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_dflash.planning import Floats, Ints, Records
from vllm_dflash.planning.compiled import compiled
from vllm_dflash.planning.costs import decoding_seconds
from vllm_dflash.planning.forecast import THRESHOLDS, Summary
from vllm_dflash.planning.objective import rate_of

LEAST_WORTH = 1e-6
"""Least worth of a draft that is given a place."""


class Expected(NamedTuple):
    """What is known about the drafts of R requests before they exist."""

    limits: Ints
    """Most drafts that each request can use, [R]."""
    context_lens: Ints
    """Tokens of context, [R]."""
    min_worth: Floats
    """Worth that a draft must exceed to pay for reading that context, [R]; 0: reading it costs next
    to nothing."""
    curves: Floats
    """Worth of the drafts, falling, [R, K]; see `objective`."""
    groups: Ints
    """Forecast group of each request that gets a block; -1: its text's drafts, [R]."""
    block_seconds: float = 0.0


@compiled
def with_a_block(texts: Floats, scores: Floats, summary: Summary) -> tuple[Floats, Ints]:
    """Return what to expect of R requests that get a block: its drafts, or those of a text that
    promises more.

    Args:
        texts: worth of what their texts predict, [R, K].
        scores: scores of the requests by the forecast, [R].
        summary: summary of that forecast.

    Returns:
        Worth of their drafts, [R, K], and where they come from, [R]: see `Expected.groups`.
    """
    curves, groups = texts.copy(), np.full(len(texts), -1)
    for request in range(len(texts)):
        group = 0
        while scores[request] < summary.min_scores[group]:
            group += 1
        block = summary.gain[group, 0]  # summed up, [K]
        if texts[request].sum() <= block[-1]:
            groups[request] = group
            curves[request] = block
            curves[request, 1:] -= block[:-1]
    return curves, groups


@compiled
def num_worth(curve: Floats, limit: int, min_worth: float) -> int:
    """Return how many first drafts, up to a limit, are worth more than `min_worth`."""
    for draft in range(min(limit, len(curve))):
        if curve[draft] <= min_worth:
            return draft
    return min(limit, len(curve))


@compiled
def best_trimmed(
    records: Records, expected: Expected, summary: Summary, fair: bool
) -> tuple[Ints, float]:
    """Choose places where the device drops all drafts below the best of T thresholds of worth.

    Returns places for drafts of each request, [R], and the rate of the step (`rate_of`).
    """
    limits, context_lens, min_worth, curves, groups, block_seconds = expected
    count, lengths = len(limits), np.zeros(len(limits), np.int64)
    kept, gain, reading = np.zeros((3, len(THRESHOLDS)))
    for request in range(count):
        worth = num_worth(curves[request], limits[request], min_worth[request])
        lengths[request] = worth if min_worth[request] > 0.0 else limits[request]
        group, last = groups[request], lengths[request] - 1
        for number in range(len(THRESHOLDS) if worth else 0):
            drafts = accepted = 0.0
            if group >= 0:
                drafts, accepted = (
                    summary.kept[group, number, last],
                    summary.gain[group, number, last],
                )
            else:
                for draft in range(worth):
                    if curves[request, draft] >= THRESHOLDS[number]:
                        drafts, accepted = drafts + 1.0, accepted + curves[request, draft]
            kept[number] += drafts
            gain[number] += accepted
            reading[number] += drafts * context_lens[request]
    context = float(context_lens.sum())
    seconds = decoding_seconds(records, count, context, count + kept, reading)
    return lengths, rate_of(count, gain, seconds + block_seconds, fair).max()


@compiled
def best_untrimmed(
    records: Records, expected: Expected, alike: Ints, ragged_seconds: float, fair: bool
) -> tuple[Ints, float]:
    """Choose places where drafts are verified as given: the same number for all requests, or those
    worth more than a threshold.

    Args:
        records: costs, [1].
        expected: what is known about R requests.
        alike: lengths that all requests can be given, [C].
        ragged_seconds: extra time of a step whose requests have other lengths.
        fair: the objective.

    Returns:
        Places for drafts of each request, [R], and the rate of the step (`rate_of`).
    """
    limits, context_lens, min_worth, curves, _, block_seconds = expected
    count, num_steps = len(limits), len(alike) + len(THRESHOLDS)
    lengths = np.zeros((num_steps, count), np.int64)
    kept, gain, reading, more_seconds = np.zeros((4, num_steps))
    for number in range(num_steps):
        for request in range(count):
            if number < len(alike):
                length = min(alike[number], limits[request])
            else:
                least = max(min_worth[request], LEAST_WORTH)
                length = num_worth(curves[request], limits[request], least)
                while length and curves[request, length - 1] < THRESHOLDS[number - len(alike)]:
                    length -= 1
            lengths[number, request] = length
            kept[number] += length
            gain[number] += curves[request, :length].sum()
            reading[number] += length * context_lens[request]
        first = lengths[number, 0]
        if (lengths[number] != first).any() or (first and not (alike == first).any()):
            more_seconds[number] = ragged_seconds
    context = float(context_lens.sum())
    seconds = decoding_seconds(records, count, context, count + kept, reading)
    rates = rate_of(count, gain, seconds + block_seconds + more_seconds, fair)
    best = rates.argmax()
    return lengths[best], rates[best]
