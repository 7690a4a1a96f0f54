"""What a step promises whose drafts nobody has seen yet: with a block, with texts alone, and plain.

Survival of the drafts to come is expected: of a text that goes on as it did, its own; of a block,
that of recent blocks of requests like this one (`forecast.py`), of each of which those drafts are
kept that turn out to be good, where the device can trim them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_dflash.planning import Floats, Ints, Records
from vllm_dflash.planning.compiled import compiled
from vllm_dflash.planning.costs import block_seconds, decoding_seconds
from vllm_dflash.planning.curves import Record
from vllm_dflash.planning.forecast import THRESHOLDS

LEAST_READING = 0.02
"""Accepted drafts that reading a context for one more draft must be worth before it counts."""
LEAST_SURVIVAL = 1e-6
"""Of a draft that is given a place."""


class Expected(NamedTuple):
    """What is known of the drafts of R requests before there are any."""

    context_lens: Ints
    """Tokens of context, [R]."""
    limits: Ints
    """Drafts that each can use at most, [R]."""
    texts: Floats
    """Survival of what each text predicts, [R, K]."""
    scores: Floats
    """Of the requests, by the forecast, [R]."""
    least_score: Floats
    """See `forecast.Summary`, [G]."""
    kept: Floats
    """[G, T, K]."""
    gain: Floats
    """[G, T, K]."""


class Rules(NamedTuple):
    """What lengths drafts may have."""

    choices: Ints
    """Those that all requests of a step can be given alike, ascending, without 0."""
    trims: bool
    """Whether the device verifies only those drafts that are worth it."""
    ragged_seconds: float
    """What a step takes longer whose requests have different lengths."""


class Prospect(NamedTuple):
    """A step, and what it promises."""

    lengths: Ints
    """Places for drafts of each request, [R]."""
    rate: float
    """Tokens a second."""


@compiled
def worth_of(curve: Floats, limit: int, reading: float) -> int:
    """First drafts of a request that its limit allows and that are worth their reading."""
    for draft in range(min(limit, len(curve))):
        if curve[draft] <= reading:
            return draft
    return min(limit, len(curve))


@compiled
def best_trimmed(
    costs: Record, expected: Expected, curves: Floats, groups: Ints, drafting: float, price: float
) -> Prospect:
    """Where the device drops drafts below the best of T thresholds.

    Args:
        costs: of steps.
        expected: of R requests.
        curves: survival of their drafts, [R, K].
        groups: by the forecast, of those who get a block; -1: its text's drafts, [R].
        drafting: seconds of the block; 0: none.
        price: drafts that a token of context costs which is read for one more.
    """
    context_lens, limits = expected.context_lens, expected.limits
    count, thresholds = len(limits), expected.kept.shape[1]
    drafts, tokens, reading = np.zeros((3, thresholds))
    lengths = np.zeros(count, np.int64)
    for request in range(count):
        cost = price * context_lens[request]
        counts = cost > LEAST_READING
        worth = worth_of(curves[request], limits[request], cost if counts else 0.0)
        lengths[request] = worth if counts else limits[request]
        group = groups[request]
        for threshold in range(thresholds if worth else 0):
            kept = gain = 0.0
            if group >= 0:
                kept = expected.kept[group, threshold, lengths[request] - 1]
                gain = expected.gain[group, threshold, lengths[request] - 1]
            else:
                for draft in range(worth):
                    if curves[request, draft] >= THRESHOLDS[threshold]:
                        kept, gain = kept + 1.0, gain + curves[request, draft]
            drafts[threshold] += kept
            tokens[threshold] += gain
            reading[threshold] += kept * context_lens[request]
    best, context = 0.0, float(context_lens.sum())
    for threshold in range(thresholds):
        rows = count + drafts[threshold]
        seconds = decoding_seconds(costs, count, rows, context, reading[threshold])
        best = max(best, (count + tokens[threshold]) / (seconds + drafting))
    return Prospect(lengths, best)


@compiled
def best_given(
    costs: Record,
    expected: Expected,
    curves: Floats,
    rules: Rules,
    drafting: float,
    price: float,
) -> Prospect:
    """Where drafts are verified as they are given: as many of each request, or not; arguments as
    of `best_trimmed`."""
    context_lens, limits, choices = expected.context_lens, expected.limits, rules.choices
    count, context = len(limits), float(context_lens.sum())
    best, best_rate = np.zeros(count, np.int64), 0.0
    lengths = np.zeros(count, np.int64)
    for number in range(len(choices) + len(THRESHOLDS)):
        is_alike = number < len(choices)
        least = LEAST_SURVIVAL if is_alike else THRESHOLDS[number - len(choices)]
        drafts = tokens = reading = 0.0
        is_ragged = False
        for request in range(count):
            if is_alike:
                length = min(choices[number], limits[request])
            else:
                cost = price * context_lens[request]
                least_worth = cost if cost > LEAST_READING else LEAST_SURVIVAL
                length = worth_of(curves[request], limits[request], least_worth)
                while length and curves[request, length - 1] < least:
                    length -= 1
            for draft in range(length):
                tokens += curves[request, draft]
            drafts += length
            reading += length * context_lens[request]
            lengths[request] = length
            is_ragged |= length != lengths[0]
        if not is_ragged and lengths[0]:
            is_ragged = not (choices == lengths[0]).any()
        seconds = decoding_seconds(costs, count, count + drafts, context, reading)
        rate = (count + tokens) / (seconds + drafting + rules.ragged_seconds * is_ragged)
        if rate > best_rate:
            best_rate = rate
            best[:] = lengths
    return Prospect(best, best_rate)


@compiled
def prospects_of(
    records: Records, expected: Expected, rules: Rules, looks_up: bool
) -> tuple[float, Prospect, Prospect]:
    """Seconds of a plain step, and what steps promise: with texts alone, and with a block."""
    costs, limits = records[0], expected.limits
    texts, count = expected.texts, len(limits)
    context = float(expected.context_lens.sum())
    rest_seconds = decoding_seconds(costs, count, float(count), context, 0.0)
    price = count / rest_seconds * costs.attention[1]
    nothing: Ints = np.full(count, -1)
    of_texts = Prospect(np.zeros(count, np.int64), 0.0)
    if looks_up and (texts[:, 0] > 0.0).any():
        if rules.trims:
            of_texts = best_trimmed(costs, expected, texts, nothing, 0.0, price)
        else:
            of_texts = best_given(costs, expected, texts, rules, 0.0, price)
    curves, groups = both(expected)
    drafting = block_seconds(costs, count * (1.0 + texts.shape[1]), context)
    if rules.trims:
        of_blocks = best_trimmed(costs, expected, curves, groups, drafting, price)
    else:
        of_blocks = best_given(costs, expected, curves, rules, drafting, price)
    return rest_seconds, of_texts, of_blocks


@compiled
def both(expected: Expected) -> tuple[Floats, Ints]:
    """Survival with a block, where texts that promise more are taken in its stead, [R, K], and
    each request's group, or -1 for its text, [R]."""
    curves, groups = expected.texts.copy(), np.full(len(expected.limits), -1)
    least, gain = expected.least_score, expected.gain
    for request in range(len(curves)):
        group = 0
        while expected.scores[request] < least[group]:
            group += 1
        if curves[request].sum() > gain[group, 0, -1]:
            continue
        groups[request] = group
        for draft in range(curves.shape[1]):
            before = gain[group, 0, draft - 1] if draft else 0.0
            curves[request, draft] = gain[group, 0, draft] - before
    return curves, groups


@compiled
def seen_with_a_block(curves: Floats, found: Floats, promised: Floats) -> Floats:
    """Survival of the drafts that a block's step has brought, [R, K].

    They are the text's where these are better. Where that was not to be foreseen, it is part of
    what a block's step brings.

    Args:
        curves: of the blocks, [R, K].
        found: of what the texts predicted, [R, K].
        promised: of what they were expected to, [R, K].
    """
    seen = curves.copy()
    for request in range(len(curves)):
        block = curves[request].sum()
        if found[request].sum() > block >= promised[request].sum():
            seen[request] = found[request]
    return seen
