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
from vllm_dflash.planning.costs import block_seconds, decoding_seconds, many_decoding_seconds
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


class Undrafted(NamedTuple):
    """The best step in which nobody is drafted."""

    rate: float
    """Tokens per second."""
    plain_rate: float
    """The same, if it verifies nothing."""
    plain_seconds: float
    row_seconds: float
    """What one more row takes."""


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
def of_each_text(texts: Floats) -> tuple[Floats, Floats]:
    """Drafts of each text that survive each threshold, and how many of those are accepted, from
    their survival, [R, F] to [R, T] each."""
    kept, gain = np.zeros((len(texts), len(THRESHOLDS))), np.zeros((len(texts), len(THRESHOLDS)))
    for request in range(len(texts)):
        for threshold in range(len(THRESHOLDS)):
            for survival in texts[request]:
                if survival < THRESHOLDS[threshold] or survival == 0.0:
                    break  # it never grows
                kept[request, threshold] += 1.0
                gain[request, threshold] += survival
    return kept, gain


@compiled
def of_texts(
    each: tuple[Floats, Floats], drafted: Bools, context_lens: Ints
) -> tuple[Floats, Floats, Floats]:
    """Of `of_each_text`, the sums over requests that are not drafted, and the tokens of context
    that attention reads for those drafts, [T] each."""
    kept, gain, reading = np.zeros((3, len(THRESHOLDS)))
    for request in range(len(each[0])):
        for threshold in range(0 if drafted[request] else len(THRESHOLDS)):
            drafts = each[0][request, threshold]
            kept[threshold] += drafts
            gain[threshold] += each[1][request, threshold]
            reading[threshold] += drafts * context_lens[request]
    return kept, gain, reading


@compiled
def best_undrafted(records: Records, batch: Batch) -> Undrafted:
    """How many free drafts are best verified, and what comes of it; costs: [1]."""
    costs, count = records[0], len(batch.context_lens)
    context = float(batch.context_lens.sum())
    plain = decoding_seconds(costs, count, float(count), context, 0.0)
    plain_rate = best = count / plain
    best_rows = float(count)
    nobody = np.zeros(count, np.bool_)
    kept, gain, reading = of_texts(of_each_text(batch.texts), nobody, batch.context_lens)
    for threshold in range(len(THRESHOLDS)):
        if not kept[threshold]:
            break  # and none at a higher one
        rows = count + kept[threshold]
        rate = count + gain[threshold]
        rate /= decoding_seconds(costs, count, rows, context, reading[threshold])
        if rate > best:
            best, best_rows = rate, rows
    row = seconds_at(costs.verify, best_rows + 1.0) - seconds_at(costs.verify, best_rows)
    return Undrafted(best, plain_rate, plain, max(row, 0.0))


@compiled
def worth_drafting(
    costs: Record, batch: Batch, groups: Ints, summary: Summary, undrafted: Undrafted
) -> Bools:
    """Whose drafts bring more than attention over its context takes, and than its text does, [R].

    Drafting makes attention dearer, the more so the longer the context is. A request that loses by
    that alone at the price of a step without the drafter, and there is no lower one, is not
    drafted, whatever the others do. Nor is one whose free drafts bring as much.
    """
    worth = batch.limits > 0
    row_worth = undrafted.rate * undrafted.row_seconds
    for request in range(len(worth)):
        if not worth[request]:
            continue
        text = 0.0
        if len(batch.texts):
            for survival in batch.texts[request]:
                text += max(survival - row_worth, 0.0)
        reading = undrafted.rate * batch.context_lens[request]
        draft_price = costs.attention[1] * reading + (row_worth if text else 0.0)
        kept, gain, best = summary.kept[groups[request]], summary.gain[groups[request]], -np.inf
        for threshold in range(kept.shape[0]):
            for width in range(kept.shape[1]):
                best = max(best, gain[threshold, width] - draft_price * kept[threshold, width])
        worth[request] = best - costs.attention[2] * reading > text
    return worth


@compiled
def best_choice(
    records: Records, batch: Batch, summary: Summary, undrafted: Undrafted, max_draft: int
) -> Choice:
    """Whom to draft, and how wide: all groups, thresholds and widths of a forecast are tried.

    Args:
        records: costs, [1].
        batch: of whom some can be drafted.
        summary: of recent blocks.
        undrafted: the best step without the drafter.
        max_draft: drafts of a block.
    """
    costs, (scores, limits, waiting, context_lens, texts) = records[0], batch
    num_requests, context = len(limits), float(context_lens.sum())
    groups = np.zeros(num_requests, np.int64)
    for request in range(num_requests):
        while scores[request] < summary.least_score[groups[request]]:
            groups[request] += 1
    able = limits > 0
    if len(texts) or costs.attention[1] > 0.0 or costs.attention[2] > 0.0:
        worth = worth_drafting(costs, batch, groups, summary, undrafted)
        if worth.any():
            able = worth
    widest = min(limits[able].max(), max_draft)
    # What is behind has to be caught up with once, and then pays for many steps.
    rows_to_store = 1 + waiting[able].sum() / able.sum() / CATCH_UP_STEPS
    drafted, chosen = np.zeros(num_requests, np.bool_), np.zeros(num_requests, np.bool_)
    kept, gain = np.zeros(summary.kept[0].shape), np.zeros(summary.kept[0].shape)  # [T, K]
    each_text, count, block_context = of_each_text(texts), 0, 0.0
    best_width, best_rate, best_tokens = 0, -np.inf, 0.0
    for group in range(len(summary.kept)):  # the best ones first
        members = 0
        for request in range(num_requests):
            if able[request] and groups[request] == group:
                drafted[request] = True
                members += 1
                block_context += context_lens[request]
        count += members
        kept = members * summary.kept[group] + kept
        gain = members * summary.gain[group] + gain
        if not count:
            continue
        storing = seconds_at(costs.context, count * rows_to_store)
        text_kept, text_gain, text_reading = of_texts(each_text, drafted, context_lens)
        for width in range(1, widest + 1):
            drafting = block_seconds(costs, float(count * (1 + width)), block_context) + storing
            before = -1.0
            for threshold in range(len(kept)):
                drafts = kept[threshold, width - 1] + text_kept[threshold]
                if drafts == before:
                    continue  # the same drafts
                before = drafts
                tokens = num_requests + gain[threshold, width - 1] + text_gain[threshold]
                reading = kept[threshold, width - 1] * (block_context / count)
                reading += text_reading[threshold]
                rows = num_requests + drafts
                seconds = decoding_seconds(costs, num_requests, rows, context, reading)
                rate = tokens / (seconds + drafting)
                if rate > best_rate:
                    best_width, best_rate, best_tokens = width, rate, tokens
                    chosen[:] = drafted
    return Choice(chosen, best_width, best_rate, best_tokens)


class Drafts(NamedTuple):
    """What R requests could have verified."""

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


class Lengths(NamedTuple):
    """Drafts to verify of each request, by where they come from; of one source each."""

    blocks: Ints
    """[R]."""
    texts: Ints
    """[R]."""


@compiled
def cut_chains(worth: Floats, limits: Ints, seconds: Floats, price: float) -> Ints:
    """How many of each request's drafts to verify: exact.

    Maximises `sum(worth) - price * seconds[count]` over all lengths. With price the best rate that
    can be had (tokens per second), this attains it (Dinkelbach's rule for ratios), and what was
    already spent on drafting is sunk. A draft is never worth more than the one before it, so the
    best n are the n that are worth most, and only n has to be searched. The same holds of the nodes
    of trees, best first.

    Args:
        worth: of each draft: its survival, or less where it costs time of its own, [R, w].
        limits: drafts of each request that can be verified, [R].
        seconds: time of a step that verifies 0 to C = sum(limits) of them, [C + 1].
        price: expected tokens a second is worth.

    Returns:
        Lengths, [R].
    """
    in_order, number = np.empty(len(seconds) - 1), 0
    for request in range(len(limits)):
        for position in range(limits[request]):
            in_order[number] = worth[request, position]
            number += 1
    best_first = -np.sort(-in_order)
    total, best, count = 0.0, -price * seconds[0], 0
    for number in range(len(best_first)):
        total += best_first[number]
        value = total - price * seconds[number + 1]
        if value > best:
            best, count = value, number + 1
    lengths, least = np.zeros(len(limits), np.int64), best_first[count - 1] if count else np.inf
    equals = count - (in_order > least).sum()  # of those that are worth just the least
    for request in range(len(limits)):
        for position in range(limits[request]):
            is_equal = worth[request, position] == least and equals > 0
            equals -= is_equal
            lengths[request] += is_equal or worth[request, position] > least
    return lengths


@compiled
def choose_lengths(
    records: Records, drafts: Drafts, price: float, row_worth: float, least: int, is_probe: bool
) -> Lengths:
    """Of each request's block and text take what is worth more, and cut it where it is not.

    Args:
        records: costs, [1].
        drafts: of R requests.
        price: expected tokens a second is worth.
        row_worth: tokens that the time of one more row is worth.
        least: drafts of a block to verify whatever they seem worth.
        is_probe: whether those who were drafted verify their blocks in any case.
    """
    costs, num_requests, block = records[0], len(drafts.drafted), 0
    width = max(drafts.blocks.shape[1], drafts.texts.shape[1])
    worth, context = np.zeros((num_requests, width)), float(drafts.context_lens.sum())
    limits, from_text = np.zeros(num_requests, np.int64), np.zeros(num_requests, np.bool_)
    for request in range(num_requests):
        text_value = block_value = 0.0
        if len(drafts.texts):
            for survival in drafts.texts[request]:
                limits[request] += survival > 0.0
                text_value += max(survival - row_worth, 0.0)
        from_text[request] = limits[request] > 0
        curve = drafts.texts[request] if from_text[request] else worth[request]
        if drafts.drafted[request]:
            most = min(drafts.limits[request], drafts.blocks.shape[1])
            for survival in drafts.blocks[block, :most]:
                block_value += max(survival - row_worth, 0.0)
            if is_probe or not from_text[request] or text_value <= block_value:
                curve, limits[request], from_text[request] = drafts.blocks[block], most, False
            block += 1
        # What attention takes for a draft is its own; all else depends on how many there are.
        reading = price * costs.attention[1] * drafts.context_lens[request]
        for position in range(limits[request]):
            worth[request, position] = curve[position] - reading
    rows = num_requests + np.arange(limits.sum() + 1).astype(np.float64)
    seconds = many_decoding_seconds(costs, num_requests, rows, context, 0.0)
    lengths = cut_chains(worth, limits, seconds, price)
    blocks, texts = lengths * ~from_text, lengths * from_text
    for request in range(num_requests):
        if drafts.drafted[request] and not from_text[request]:
            blocks[request] = max(lengths[request], min(limits[request], least))
    return Lengths(blocks, texts)
