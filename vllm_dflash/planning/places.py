"""How many places drafts get in a step, on Model Runner V2: the search for the best rate."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_dflash.planning import Floats, Ints, Records
from vllm_dflash.planning.compiled import compiled
from vllm_dflash.planning.costs import decoding_seconds
from vllm_dflash.planning.forecast import Summary, group_of
from vllm_dflash.planning.objective import fastest
from vllm_dflash.planning.thresholds import THRESHOLDS, above_thresholds

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
def expect_blocks(texts: Floats, scores: Floats, summary: Summary) -> tuple[Floats, Ints]:
    """Return the expected drafts of R requests that get a block: the block's, or those of a text
    that promises more.

    Args:
        texts: worth of what their texts predict, [R, K].
        scores: scores of the requests by the forecast, [R].
        summary: summary of that forecast.

    Returns:
        Worth of their drafts, [R, K], and where they come from, [R]: see `Expected.groups`.
    """
    curves, groups = texts.copy(), np.full(len(texts), -1)
    for request in range(len(texts)):
        group = group_of(summary, scores[request])
        block = summary.gain[group, 0]  # summed up, [K]
        if texts[request].sum() <= block[-1]:
            groups[request] = group
            curves[request] = block
            curves[request, 1:] -= block[:-1]
    return curves, groups


@compiled
def best_lengths(
    records: Records, expected: Expected, alike: Ints, ragged_seconds: float, fair: bool
) -> tuple[Ints, float]:
    """Choose places for drafts: the same number for all requests, or those worth more than a
    threshold.

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
    gain, more_seconds = np.zeros((2, num_steps))
    found = above_thresholds(curves, limits, np.maximum(min_worth, LEAST_WORTH))
    for number in range(num_steps):
        if number < len(alike):
            lengths[number] = np.minimum(alike[number], limits)
        else:
            lengths[number] = found[0, :, number - len(alike)]
        for request in range(count):
            gain[number] += curves[request, : lengths[number, request]].sum()
        first = lengths[number, 0]
        if (lengths[number] != first).any() or (first and not (alike == first).any()):
            more_seconds[number] = ragged_seconds
    drafts, reading = 1.0 * lengths.sum(axis=1), (lengths * context_lens).sum(axis=1)
    context = float(context_lens.sum())
    seconds = decoding_seconds(records, count, context, count + drafts, 1.0 * reading)
    best, rate = fastest(count, gain, seconds + block_seconds + more_seconds, fair)
    return lengths[best], rate
