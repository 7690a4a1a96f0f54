"""How many places the drafts of a step get, on Model Runner V2: the search for the best rate.

Where the device trims drafts, all requests get places for what they can use, and the best threshold
of survival says what a step will verify. Where it does not, drafts are verified as they are given.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_dflash.planning import Floats, Ints, Records
from vllm_dflash.planning.compiled import compiled
from vllm_dflash.planning.costs import decoding_seconds
from vllm_dflash.planning.forecast import THRESHOLDS, Summary

LEAST_SURVIVAL = 1e-6
"""Least survival of a draft that is given a place."""


class Expected(NamedTuple):
    """What is known of the drafts of R requests before there are any."""

    limits: Ints
    """Drafts that each can use at most, [R]."""
    context_lens: Ints
    """Tokens of context, [R]."""
    min_survival: Floats
    """Survival from which on a draft is worth reading that context for it, [R]; 0: it costs next to
    nothing."""
    curves: Floats
    """Survival of their drafts, falling, [R, K]."""
    groups: Ints
    """By the forecast, of those who get a block; -1: its text's drafts, [R]."""
    block_seconds: float = 0.0


@compiled
def with_a_block(texts: Floats, scores: Floats, summary: Summary) -> tuple[Floats, Ints]:
    """What to expect of R requests that get a block: its drafts, or those of a text that promises
    more.

    Args:
        texts: survival of what their texts predict, [R, K].
        scores: by the forecast, [R].
        summary: of that.

    Returns:
        Survival of their drafts, [R, K], and whose they are, [R]: see `Expected.groups`.
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
def num_worth(curve: Floats, limit: int, min_survival: float) -> int:
    """First drafts of a request, up to a limit, that survive more often than that."""
    for draft in range(min(limit, len(curve))):
        if curve[draft] <= min_survival:
            return draft
    return min(limit, len(curve))


@compiled
def best_trimmed(records: Records, expected: Expected, summary: Summary) -> tuple[Ints, float]:
    """Where the device drops all drafts that survive less than the best of T thresholds.

    Returns places for drafts of each request, [R], and tokens a second.
    """
    limits, context_lens, min_survival, curves, groups, block_seconds = expected
    count, lengths = len(limits), np.zeros(len(limits), np.int64)
    kept, gain, reading = np.zeros((3, len(THRESHOLDS)))
    for request in range(count):
        worth = num_worth(curves[request], limits[request], min_survival[request])
        lengths[request] = worth if min_survival[request] > 0.0 else limits[request]
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
    return lengths, ((count + gain) / (seconds + block_seconds)).max()


@compiled
def best_given(
    records: Records, expected: Expected, alike: Ints, ragged_seconds: float
) -> tuple[Ints, float]:
    """Where drafts are verified as they are given: as many of each request, or those that survive a
    threshold.

    Args:
        records: costs, [1].
        expected: of R requests.
        alike: lengths that all can be given alike, [C].
        ragged_seconds: what a step takes longer whose requests have other ones.

    Returns:
        Places for drafts of each request, [R], and tokens a second.
    """
    limits, context_lens, min_survival, curves, _, block_seconds = expected
    count, num_steps = len(limits), len(alike) + len(THRESHOLDS)
    lengths = np.zeros((num_steps, count), np.int64)
    kept, gain, reading, more_seconds = np.zeros((4, num_steps))
    for number in range(num_steps):
        for request in range(count):
            if number < len(alike):
                length = min(alike[number], limits[request])
            else:
                survives = max(min_survival[request], LEAST_SURVIVAL)
                length = num_worth(curves[request], limits[request], survives)
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
    rates = (count + gain) / (seconds + block_seconds + more_seconds)
    best = rates.argmax()
    return lengths[best], rates[best]
