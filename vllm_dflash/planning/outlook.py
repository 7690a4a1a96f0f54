"""Of all that could be drafted, what promises the best rate: a search through the forecast."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_dflash.planning import Bools, Floats, Ints, Records
from vllm_dflash.planning.compiled import compiled
from vllm_dflash.planning.curves import Record, seconds_at
from vllm_dflash.planning.work import (
    Work,
    block_seconds,
    decoding_seconds,
    level_of,
    plain_seconds,
)

CATCH_UP_STEPS = 64
"""Steps over which the cost of storing context that has waited is spread."""


class Able(NamedTuple):
    """Of a batch of R requests, the A that can use drafts."""

    mask: Bools
    """Which they are, [R]."""
    scores: Floats
    """Their first survival, [A]."""
    context_lens: Floats
    """Their tokens of context, [A]."""
    widest: int
    """Drafts that any of them can use."""
    mean_waiting: float
    """Context rows that wait for one, in the mean."""


@compiled
def able_requests(
    first_survival: Floats, limits: Ints, waiting: Ints, context_lens: Ints, max_draft: int
) -> Able:
    """Those with a limit; see `Step`. First survival is each one's, [R]; K drafts at most."""
    mask = limits > 0
    count = mask.sum()
    scores, lens = np.empty(count), np.empty(count)
    widest = able = all_waiting = 0
    for request in range(len(limits)):
        if mask[request]:
            scores[able] = first_survival[request]
            lens[able] = context_lens[request]
            widest = max(widest, min(limits[request], max_draft))
            all_waiting += waiting[request]
            able += 1
    return Able(mask, scores, lens, widest, all_waiting / max(count, 1))


class Choice(NamedTuple):
    """The requests and the width that promise the best rate."""

    drafted: Bools
    """[R]."""
    width: int
    rate: float
    """Tokens per second."""
    tokens: float
    """Expected of the step."""
    plain_seconds: float
    """What it would take without drafts."""


@compiled
def best_choice(
    records: Records,
    context: float,
    able: Bools,
    scores: Floats,
    context_lens: Floats,
    widest: int,
    mean_waiting: float,
    drafted: Ints,
    least_score: Floats,
    kept: Floats,
    gain: Floats,
    whole_batch: bool,
) -> Choice:
    """Search all groups of requests, thresholds and widths of a forecast.

    Args:
        records: costs, [1].
        context: tokens of context of all R requests.
        able, scores, context_lens, widest, mean_waiting: see `Able`.
        drafted, least_score, kept, gain: `forecast.Outcomes`: [G], [G], [G, T, K], [G, T, K].
        whole_batch: whether everybody is drafted to the full, or nobody.
    """
    costs, num_requests = records[0], len(able)
    plain = plain_seconds(costs, num_requests, context)
    plain_level = level_of(costs, num_requests, False)
    level = level_of(costs, num_requests, True)
    best_least, best_width, best_rate, best_tokens = np.inf, 0, -np.inf, 0.0
    num_groups, num_thresholds, max_draft = kept.shape
    for group in range(num_groups - 1 if whole_batch else 0, num_groups):
        count = drafted[group]
        if not count:
            continue
        # What is behind has to be caught up with once, and then pays for many steps.
        context_rows = count * (1 + mean_waiting / CATCH_UP_STEPS)
        storing = seconds_at(costs.context, context_rows)
        group_context = 0.0
        for request in range(len(scores)):
            if scores[request] >= least_score[group]:
                group_context += context_lens[request]
        mean_context = group_context / count
        for width in range(widest if whole_batch else 1, widest + 1):
            block_rows = num_requests * (1 + max_draft) if whole_batch else count * (1 + width)
            read = context if whole_batch else group_context
            drafting = block_seconds(costs, float(block_rows), read) + storing
            for threshold in range(num_thresholds):
                drafts = kept[group, threshold, width - 1]
                if threshold and drafts == kept[group, threshold - 1, width - 1]:
                    continue  # the same drafts
                tokens = num_requests + gain[group, threshold, width - 1]
                rows, reading = num_requests + drafts, drafts * mean_context
                work = Work(num_requests, rows, context, reading, 0.0, 0.0, 0.0)
                seconds = decoding_seconds(costs, work, level if drafts > 0 else plain_level)
                rate = tokens / (seconds + drafting)
                if rate > best_rate:
                    best_least, best_width = least_score[group], width
                    best_rate, best_tokens = rate, tokens
    chosen, number = able.copy(), 0
    for request in range(num_requests):
        if able[request]:
            chosen[request] = scores[number] >= best_least
            number += 1
    return Choice(chosen, best_width, best_rate, best_tokens, plain)


@compiled
def worth_drafting(
    costs: Record,
    price: float,
    scores: Floats,
    context_lens: Floats,
    drafted: Ints,
    least_score: Floats,
    kept: Floats,
    gain: Floats,
    whole_batch: bool,
) -> Bools:
    """Whether a request's drafts bring more than attention over its context takes, [R].

    Drafting makes attention dearer, the more so the longer the context is. A request that loses by
    that alone at `price`, and plain decoding is the least price there is, is not drafted, whatever
    the others do. `drafted` and what follows: `forecast.Outcomes`.
    """
    worth = np.empty(len(scores), dtype=np.bool_)
    for request in range(len(scores)):
        group = 0
        while scores[request] < least_score[group]:
            group += 1
        count = drafted[group] - (drafted[group - 1] if group else 0)
        reading = price * context_lens[request]
        best = -np.inf
        for threshold in range(kept.shape[1]):
            for position in range(kept.shape[2]):
                drafts = kept[group, threshold, position]
                tokens = gain[group, threshold, position]
                if group:
                    drafts -= kept[group - 1, threshold, position]
                    tokens -= gain[group - 1, threshold, position]
                value = tokens - costs.attention[1] * reading * drafts
                # A block that is made of everybody is no cost of its own.
                block = 0.0 if whole_batch else costs.attention[2] * reading
                best = max(best, value / count - block)
        worth[request] = best > 0.0
    return worth
