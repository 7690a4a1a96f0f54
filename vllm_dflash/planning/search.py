"""The best rate that a step can have: searched before drafting, attained by the cut behind it.

Before, requests are in groups by the forecast (`forecast.py`), and the best groups are drafted, or
nobody; whoever is not drafted has what its text predicts. Behind it, survival of all drafts is
known, and those are verified that are worth their time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_dflash.planning import Bools, Floats, Ints, Records
from vllm_dflash.planning.compiled import compiled
from vllm_dflash.planning.costs import block_seconds, decoding_seconds
from vllm_dflash.planning.curves import Record, seconds_at
from vllm_dflash.planning.forecast import THRESHOLDS, Summary

CATCH_UP_STEPS = 64
"""Steps over which the cost of storing context that has waited is spread."""


class Batch(NamedTuple):
    """R requests, none of which is drafted yet."""

    scores: Floats
    """By the forecast, [R]."""
    limits: Ints
    """Drafts of a block that each can use at most, [R]."""
    waiting: Ints
    """Context rows of each that must be stored before it can be drafted, [R]."""
    context_lens: Ints
    """Tokens of context of each, [R]."""
    texts: Floats
    """Survival of what the text of each predicts, [R, F]; of nobody, [0, F]."""


class Choice(NamedTuple):
    """The best step in which anybody is drafted, and the best in which nobody is."""

    drafted: Bools
    """[R]."""
    width: int
    """0: nobody can be drafted."""
    rate: float
    """Tokens per second."""
    tokens: float
    """Expected of the step."""
    undrafted_rate: float
    """Tokens per second, of what texts predict as well."""
    plain_rate: float
    """The same, if nothing is verified."""
    plain_seconds: float
    row_seconds: float
    """What one more row takes where nobody is drafted."""


@compiled
def text_outcomes(texts: Floats) -> Floats:
    """Drafts of each text that survive each threshold, and how many of those are accepted, from
    their survival, [R, F] to [2, R, T]."""
    found = np.zeros((2, len(texts), len(THRESHOLDS)))
    for request in range(len(texts)):
        for threshold in range(len(THRESHOLDS)):
            for survival in texts[request]:
                if survival < THRESHOLDS[threshold] or survival == 0.0:
                    break  # it never grows
                found[0, request, threshold] += 1.0
                found[1, request, threshold] += survival
    return found


@compiled
def drafted_groups(
    costs: Record, batch: Batch, summary: Summary, price: float, row_seconds: float
) -> Ints:
    """Each request's group by the forecast; -1: who should not be drafted, whatever others do, [R].

    Drafting makes attention dearer, the more so the longer the context is. A request that loses by
    that alone at the price of a step without the drafter, and there is no lower one, is not
    drafted. Nor is one whose free drafts bring as much. Where that is everybody, all are tried.
    """
    groups, is_worth = np.zeros(len(batch.limits), np.int64), np.zeros(len(batch.limits), np.bool_)
    any_worth = False
    for request in range(len(groups)):
        group, text = 0, 0.0
        while batch.scores[request] < summary.min_scores[group]:
            group += 1
        groups[request] = group if batch.limits[request] else -1
        if len(batch.texts):
            for survival in batch.texts[request]:
                text += max(survival - price * row_seconds, 0.0)
        reading = price * batch.context_lens[request]
        draft_price = costs.attention[1] * reading + (price * row_seconds if text else 0.0)
        kept, gain, best = summary.kept[group], summary.gain[group], -np.inf
        for threshold in range(kept.shape[0]):
            for width in range(kept.shape[1]):
                best = max(best, gain[threshold, width] - draft_price * kept[threshold, width])
        is_worth[request] = groups[request] >= 0 and best - costs.attention[2] * reading > text
        any_worth |= is_worth[request]
    for request in range(len(groups) if any_worth else 0):
        if not is_worth[request]:
            groups[request] = -1
    return groups


@compiled
def best_step(  # noqa: C901 - one loop over groups, thresholds and widths
    records: Records, batch: Batch, summary: Summary, max_draft: int
) -> Choice:
    """All groups, thresholds and widths of a forecast are tried, and nobody.

    Args:
        records: costs, [1].
        batch: of whom some may be drafted.
        summary: of recent blocks.
        max_draft: drafts of a block; 0: the drafter rests.
    """
    costs, (_, limits, waiting, context_lens, texts) = records[0], batch
    num_requests, num_thresholds, context = len(limits), len(THRESHOLDS), 0.0
    for request in range(num_requests):
        context += context_lens[request]
    # Of texts, those who are not drafted: drafts kept, gained, and the context read for them.
    outcomes, of_texts = text_outcomes(texts), np.zeros((3, num_thresholds))
    for request in range(len(texts)):
        for threshold in range(num_thresholds):
            of_texts[0, threshold] += outcomes[0, request, threshold]
            of_texts[1, threshold] += outcomes[1, request, threshold]
            of_texts[2, threshold] += outcomes[0, request, threshold] * context_lens[request]
    rows, reading = np.zeros(1 + num_thresholds), np.zeros(1 + num_thresholds)
    rows[0] = num_requests
    for threshold in range(num_thresholds):
        rows[1 + threshold] = num_requests + of_texts[0, threshold]
        reading[1 + threshold] = of_texts[2, threshold]
    seconds = decoding_seconds(records, num_requests, context, rows, reading)
    plain_rate = undrafted_rate = num_requests / seconds[0]
    best_rows = float(num_requests)
    for threshold in range(num_thresholds):
        rate = (num_requests + of_texts[1, threshold]) / seconds[1 + threshold]
        if rate > undrafted_rate:
            undrafted_rate, best_rows = rate, rows[1 + threshold]
    row = seconds_at(costs.verify, best_rows + 1.0) - seconds_at(costs.verify, best_rows)
    row, plain_seconds = max(row, 0.0), seconds[0]

    chosen, best_width, best_rate, best_tokens = np.zeros(num_requests, np.bool_), 0, -np.inf, 0.0
    groups = np.full(num_requests, -1)
    if max_draft:
        groups = drafted_groups(costs, batch, summary, undrafted_rate, row)
    widest = num_able = num_waiting = 0
    for request in range(num_requests):
        if groups[request] >= 0:
            widest = max(widest, min(limits[request], max_draft))
            num_able += 1
            num_waiting += waiting[request]
    # What is behind has to be caught up with once, and then pays for many steps.
    rows_to_store = 1 + num_waiting / max(num_able, 1) / CATCH_UP_STEPS
    num_kept, count, block_context = summary.kept.shape[1], 0, 0.0
    num_steps = num_kept * widest
    kept, gain, rows, reading = np.zeros((4, num_steps))  # width by width
    for group in range(len(summary.kept)):  # the best ones first
        members = 0
        for request in range(num_requests):
            if groups[request] == group:
                members += 1
                block_context += context_lens[request]
                for threshold in range(num_thresholds if len(texts) else 0):
                    drafts = outcomes[0, request, threshold]
                    of_texts[0, threshold] -= drafts
                    of_texts[1, threshold] -= outcomes[1, request, threshold]
                    of_texts[2, threshold] -= drafts * context_lens[request]
        count += members
        if not count:
            continue
        for step in range(num_steps):
            width, threshold = step // num_kept, step % num_kept
            kept[step] += members * summary.kept[group, threshold, width]
            gain[step] += members * summary.gain[group, threshold, width]
            rows[step] = num_requests + kept[step] + of_texts[0, threshold]
            reading[step] = kept[step] * (block_context / count) + of_texts[2, threshold]
        seconds = decoding_seconds(records, num_requests, context, rows, reading)
        storing = seconds_at(costs.context, count * rows_to_store)
        for step in range(num_steps):
            width, threshold = step // num_kept + 1, step % num_kept
            drafting = block_seconds(costs, float(count * (1 + width)), block_context) + storing
            tokens = num_requests + gain[step] + of_texts[1, threshold]
            rate = tokens / (seconds[step] + drafting)
            if rate > best_rate:
                best_width, best_rate, best_tokens = width, rate, tokens
                for request in range(num_requests):
                    chosen[request] = 0 <= groups[request] <= group
    return Choice(
        chosen, best_width, best_rate, best_tokens, undrafted_rate, plain_rate, plain_seconds, row
    )


class Drafts(NamedTuple):
    """What R requests could have verified, and what it must be worth."""

    blocks: Floats
    """Survival of the blocks of those who were drafted, [D, w]."""
    drafted: Bools
    """Who they are, [R]."""
    limits: Ints
    """Drafts of each block that can be verified, [R]."""
    texts: Floats
    """Survival of what the text of each predicts, [R, F]; of nobody, [0, F]."""
    context_lens: Ints
    """Tokens of context of each, [R]."""
    price: float
    """Expected tokens a second is worth."""
    row_worth: float
    """Tokens that the time of one more row is worth."""
    min_verified: int
    """Drafts of a block to verify whatever they seem worth."""
    is_probe: bool
    """Whether those who were drafted verify their blocks in any case."""


@compiled
def cut_chains(worth: Floats, limits: Ints, seconds: Floats, price: float) -> Ints:
    """How many of each request's drafts to verify: exact.

    Maximises `sum(worth) - price * seconds[count]` over all lengths. With price the best rate that
    can be had (tokens per second), this attains it (Dinkelbach's rule for ratios), and what was
    already spent on drafting is sunk. A draft is never worth more than the one before it, so the
    best n are the n that are worth most, and only n has to be searched.

    Args:
        worth: of each draft: its survival, or less where it costs time of its own, [R, w].
        limits: drafts of each request that can be verified, [R].
        seconds: time of a step that verifies 0 to C = sum(limits) of them, [C + 1].
        price: expected tokens a second is worth.

    Returns:
        Lengths, [R].
    """
    num_requests, most = len(limits), len(seconds) - 1
    lengths, order = np.zeros(num_requests, np.int64), np.zeros(most, np.int64)
    total, best, count = 0.0, -price * seconds[0], 0
    for number in range(most):
        next_one = -1  # of the requests, the first one whose next draft is worth most
        for request in range(num_requests):
            length = lengths[request]
            if length < limits[request] and (
                next_one < 0 or worth[request, length] > worth[next_one, lengths[next_one]]
            ):
                next_one = request
        total += worth[next_one, lengths[next_one]]
        lengths[next_one] += 1
        order[number] = next_one
        value = total - price * seconds[number + 1]
        if value > best:
            best, count = value, number + 1
    for number in range(count, most):
        lengths[order[number]] -= 1
    return lengths


@compiled
def choose_lengths(records: Records, drafts: Drafts) -> tuple[Ints, Ints]:
    """Take what is worth more of each request's block and text, and cut it where it is not.

    Args:
        records: costs, [1].
        drafts: of R requests.

    Returns:
        How many drafts of its block each is to have verified, and of its text, [R]; one of the two.
    """
    costs, num_requests, block, most = records[0], len(drafts.drafted), 0, 0
    price, row_worth = drafts.price, drafts.row_worth
    context, width = 0.0, max(drafts.blocks.shape[1], drafts.texts.shape[1])
    worth, limits = np.zeros((num_requests, width)), np.zeros(num_requests, np.int64)
    from_text = np.zeros(num_requests, np.bool_)
    for request in range(num_requests):
        text_value = block_value = 0.0
        if len(drafts.texts):
            for survival in drafts.texts[request]:
                limits[request] += survival > 0.0
                text_value += max(survival - row_worth, 0.0)
        from_text[request] = limits[request] > 0
        curve = drafts.texts[request] if from_text[request] else worth[request]
        if drafts.drafted[request]:
            usable = min(drafts.limits[request], drafts.blocks.shape[1])
            for survival in drafts.blocks[block, :usable]:
                block_value += max(survival - row_worth, 0.0)
            if drafts.is_probe or not from_text[request] or text_value <= block_value:
                curve, limits[request], from_text[request] = drafts.blocks[block], usable, False
            block += 1
        # What attention takes for a draft is its own; all else depends on how many there are.
        reading = price * costs.attention[1] * drafts.context_lens[request]
        for position in range(limits[request]):
            worth[request, position] = curve[position] - reading
        most += limits[request]
        context += drafts.context_lens[request]
    rows, no_reading = np.zeros(most + 1), np.zeros(most + 1)
    for number in range(most + 1):
        rows[number] = num_requests + number
    seconds = decoding_seconds(records, num_requests, context, rows, no_reading)
    lengths = cut_chains(worth, limits, seconds, price)
    blocks, texts = np.zeros(num_requests, np.int64), np.zeros(num_requests, np.int64)
    for request in range(num_requests):
        if from_text[request]:
            texts[request] = lengths[request]
        elif drafts.drafted[request]:
            blocks[request] = max(lengths[request], min(limits[request], drafts.min_verified))
    return blocks, texts
