"""Of all that could be drafted, what promises the best rate: a search through the forecast."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_dflash.planning import Bools, Floats, Ints, Records
from vllm_dflash.planning.compiled import compiled
from vllm_dflash.planning.curves import Record, seconds_at
from vllm_dflash.planning.forecast import Outcomes, Summary, outcomes_of
from vllm_dflash.planning.free_drafts import FreeOutcomes, Rest
from vllm_dflash.planning.work import (
    Work,
    block_seconds,
    decoding_seconds,
    level_of,
    many_decoding_seconds,
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


@compiled
def look_ahead(
    records: Records,
    first_survival: Floats,
    limits: Ints,
    waiting: Ints,
    context_lens: Ints,
    max_draft: int,
    summary: Summary,
    rest: Rest,
    free: FreeOutcomes,
) -> tuple[Able, Choice]:
    """Who can be drafted, and which of them promise the best rate, and how wide.

    Args:
        records: costs, [1].
        first_survival, limits, waiting, context_lens, max_draft: see `able_requests`.
        summary: of recent blocks.
        rest: the best step in which the drafter rests.
        free: free drafts of all requests, [R, T], or of nobody, [0, T].
    """
    able = able_requests(first_survival, limits, waiting, context_lens, max_draft)
    worthy, outcomes = able, outcomes_of(summary, able.scores)
    attention = records[0].attention
    reads = context_lens.any() and (attention[1] > 0.0 or attention[2] > 0.0)
    if able.widest and (len(free.kept) or reads):
        worth = worth_drafting(records[0], rest, able, outcomes, free)
        if worth.any() and not worth.all():
            left, number = limits.copy(), 0
            for request in range(len(limits)):
                if able.mask[request]:
                    left[request] *= worth[number]
                    number += 1
            worthy = able_requests(first_survival, left, waiting, context_lens, max_draft)
            outcomes = outcomes_of(summary, worthy.scores)
    return able, best_choice(records, context_lens, worthy, outcomes, free)


@compiled
def best_choice(
    records: Records,
    all_lens: Ints,
    able: Able,
    outcomes: Outcomes,
    free: FreeOutcomes,
) -> Choice:
    """Search all groups of requests, thresholds and widths of a forecast.

    Args:
        records: costs, [1].
        all_lens: tokens of context of all requests, [R].
        able: who can be drafted.
        outcomes: of drafting them.
        free: drafts of those who are not drafted, [R, T], or of nobody, [0, T].
    """
    costs, num_requests, context = records[0], len(all_lens), float(all_lens.sum())
    drafted, least_score, kept, gain = outcomes
    scores, widest = able.scores, able.widest
    plain_level = level_of(costs, num_requests, False)
    level = level_of(costs, num_requests, True)
    best_least, best_width, best_rate, best_tokens = np.inf, 0, -np.inf, 0.0
    num_groups, num_thresholds = kept.shape[:2]
    for group in range(num_groups):
        count = drafted[group]
        if not count:
            continue
        # What is behind has to be caught up with once, and then pays for many steps.
        context_rows = count * (1 + able.mean_waiting / CATCH_UP_STEPS)
        storing = seconds_at(costs.context, context_rows)
        group_context = 0.0
        for request in range(len(scores)):
            if scores[request] >= least_score[group]:
                group_context += able.context_lens[request]
        mean_context = group_context / count
        others = free_of_others(free, able.mask, scores, least_score[group], all_lens)
        free_kept, free_gain, free_reading = others
        for width in range(1, widest + 1):
            block_rows = count * (1 + width)
            drafting = block_seconds(costs, float(block_rows), group_context) + storing
            before = -1.0
            for threshold in range(num_thresholds):
                drafts = kept[group, threshold, width - 1] + free_kept[threshold]
                if drafts == before:
                    continue  # the same drafts
                before = drafts
                tokens = num_requests + gain[group, threshold, width - 1] + free_gain[threshold]
                rows, blocks = num_requests + drafts, drafts - free_kept[threshold]
                reading = blocks * mean_context + free_reading[threshold]
                work = Work(num_requests, rows, context, reading, 0.0, 0.0, 0.0)
                seconds = decoding_seconds(costs, work, level if drafts > 0 else plain_level)
                rate = tokens / (seconds + drafting)
                if rate > best_rate:
                    best_least, best_width = least_score[group], width
                    best_rate, best_tokens = rate, tokens
    chosen, number = able.mask.copy(), 0
    for request in range(num_requests):
        if chosen[request]:
            chosen[request] = scores[number] >= best_least
            number += 1
    return Choice(chosen, best_width, best_rate, best_tokens)


@compiled
def free_of_others(
    free: FreeOutcomes, able: Bools, scores: Floats, least_score: float, context_lens: Ints
) -> tuple[Floats, Floats, Floats]:
    """Of all requests whose score is less: free drafts, what they bring, and the tokens of context
    that attention reads for them, [T] each."""
    num_thresholds = free.kept.shape[1]
    kept, gain, reading = np.zeros((3, num_thresholds))
    number = 0
    for request in range(len(free.kept)):
        is_drafted = False
        if able[request]:
            is_drafted = scores[number] >= least_score
            number += 1
        if not is_drafted:
            for threshold in range(num_thresholds):
                kept[threshold] += free.kept[request, threshold]
                gain[threshold] += free.gain[request, threshold]
                reading[threshold] += free.kept[request, threshold] * context_lens[request]
    return kept, gain, reading


@compiled
def worth_drafting(
    costs: Record,
    rest: Rest,
    able: Able,
    outcomes: Outcomes,
    free: FreeOutcomes,
) -> Bools:
    """Whether a request's drafts bring more than attention over its context takes, [A].

    Drafting makes attention dearer, the more so the longer the context is. A request that loses by
    that alone at the price of a step without the drafter, and there is no lower one, is not
    drafted, whatever the others do. Nor is one whose free drafts bring as much.
    """
    scores = able.scores
    drafted, least_score, kept, gain = outcomes
    free_value = np.zeros(len(scores))
    number = 0
    for request in range(len(free.kept)):
        if able.mask[request]:
            for threshold in range(free.kept.shape[1]):
                rows = rest.rate * rest.row_seconds * free.kept[request, threshold]
                value = free.gain[request, threshold] - rows
                free_value[number] = max(free_value[number], value)
            number += 1
    price = rest.rate
    worth = np.empty(len(scores), dtype=np.bool_)
    for request in range(len(scores)):
        group = 0
        while scores[request] < least_score[group]:
            group += 1
        count = drafted[group] - (drafted[group - 1] if group else 0)
        reading = price * able.context_lens[request]
        best = -np.inf
        for threshold in range(kept.shape[1]):
            for position in range(kept.shape[2]):
                drafts = kept[group, threshold, position]
                tokens = gain[group, threshold, position]
                if group:
                    drafts -= kept[group - 1, threshold, position]
                    tokens -= gain[group - 1, threshold, position]
                value = tokens - costs.attention[1] * reading * drafts
                if free_value[request]:
                    value -= price * rest.row_seconds * drafts
                best = max(best, value / count - costs.attention[2] * reading)
        worth[request] = best > free_value[request]
    return worth


class Probe(NamedTuple):
    """A few requests with little to catch up, drafted to see what comes of it."""

    drafted: Bools
    """[R]."""
    seconds: float
    """That it takes."""


@compiled
def cheapest_probe(
    records: Records,
    able: Able,
    waiting: Ints,
    context_lens: Ints,
    count: int,
    block_rows: int,
    length: int,
) -> Probe:
    """Drafts `count` of those who are able, and verifies `length` drafts of each.

    Args:
        records: costs, [1].
        able: who can be drafted.
        waiting, context_lens: see `Step`, [R].
        count: how many to draft.
        block_rows: that the drafter runs for them.
        length: drafts of each to verify.
    """
    costs, num_requests = records[0], len(waiting)
    order = np.argsort(np.where(able.mask, waiting, np.inf), kind="mergesort")  # a stable one
    drafted, context = np.zeros(num_requests, dtype=np.bool_), 0.0
    for request in order[:count]:
        drafted[request] = True
        context += context_lens[request]
    rows = np.array([float(num_requests), float(num_requests + count * length)])
    verify = many_decoding_seconds(costs, num_requests, rows, 0.0, context / count)
    seconds = block_seconds(costs, float(block_rows), context) + verify[1] - verify[0]
    return Probe(drafted, seconds + catch_up_seconds(records, waiting, drafted))


@compiled
def catch_up_seconds(records: Records, waiting: Ints, drafted: Bools) -> float:
    """That storing takes of context that waits for those who are drafted; see `Step`."""
    rows = 0.0
    for request in range(len(waiting)):
        rows += waiting[request] * drafted[request]
    return seconds_at(records[0].context, rows)
