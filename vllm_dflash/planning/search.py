"""The best rate that a step can have: searched before drafting, reached by trimming afterwards.

Before drafting, requests are in groups by the forecast (`forecast.py`). The best groups are
drafted, or none; requests that are not drafted have what their text predicts. After drafting,
survival of all drafts is known, and those that are worth their time are verified.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_dflash.planning import Bools, Floats, Ints, Records
from vllm_dflash.planning.compiled import compiled
from vllm_dflash.planning.costs import block_seconds, decoding_seconds
from vllm_dflash.planning.curves import Record, seconds_at
from vllm_dflash.planning.forecast import THRESHOLDS, Summary
from vllm_dflash.planning.objective import price_of, rate_of

CATCH_UP_STEPS = 64
"""Steps over which the cost of storing waiting context is spread."""


class UndraftedBatch(NamedTuple):
    """R requests, none of which is drafted yet."""

    scores: Floats
    """Scores by the forecast, [R]."""
    limits: Ints
    """Most drafts of a block that each can use, [R]."""
    waiting: Ints
    """Context rows of each that must be stored before it can be drafted, [R]."""
    context_lens: Ints
    """Tokens of context of each, [R]."""
    texts: Floats
    """Worth of what the text of each predicts, [R, F]; [0, F]: texts predict nothing."""


class Choice(NamedTuple):
    """The best step in which some request is drafted, and the best in which none is."""

    drafted: Bools
    """Requests to draft, [R]."""
    width: int
    """Tokens to draft for each of them; 0: no request can be drafted."""
    rate: float
    """Rate of the step (`objective.rate_of`)."""
    seconds: float
    """Time of the step."""
    undrafted_rate: float
    """Rate without the drafter, with what texts predict."""
    undrafted_seconds: float
    """Time of that step."""
    plain_rate: float
    """The same, if nothing is verified."""
    plain_seconds: float
    row_seconds: float
    """Seconds that one more row takes where no request is drafted."""


@compiled
def text_outcomes(texts: Floats) -> Floats:
    """Return how many drafts of each text are above each threshold, and what those are worth
    together, from the worth of each, [R, F] to [2, R, T]."""
    found = np.zeros((2, len(texts), len(THRESHOLDS)))
    for request in range(len(texts)):
        for threshold in range(len(THRESHOLDS)):
            for worth in texts[request]:
                if worth < THRESHOLDS[threshold] or worth == 0.0:
                    break  # it never grows
                found[0, request, threshold] += 1.0
                found[1, request, threshold] += worth
    return found


@compiled
def drafted_groups(
    costs: Record, batch: UndraftedBatch, summary: Summary, price: float, row_seconds: float
) -> Ints:
    """Return each request's forecast group, [R]; -1: do not draft it, whatever others do.

    Drafting makes attention cost more, the longer the context is. A request is not drafted if it
    loses by that alone at the lowest price that any step may have. Nor
    is one drafted whose free drafts yield as much. If this excludes all requests, all are tried.
    """
    groups, is_worth = np.zeros(len(batch.limits), np.int64), np.zeros(len(batch.limits), np.bool_)
    any_worth = False
    for request in range(len(groups)):
        group, text = 0, 0.0
        while batch.scores[request] < summary.min_scores[group]:
            group += 1
        groups[request] = group if batch.limits[request] else -1
        if len(batch.texts):
            for worth in batch.texts[request]:
                text += max(worth - price * row_seconds, 0.0)
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
    records: Records, batch: UndraftedBatch, summary: Summary, max_draft: int, fair: bool
) -> Choice:
    """Find the best step over all groups, thresholds and widths of a forecast, and without a block.

    Args:
        records: costs, [1].
        batch: requests, some of which may be drafted.
        summary: summary of recent blocks.
        max_draft: drafts of a block; 0: the drafter rests.
        fair: the objective; see `objective`.
    """
    costs, (_, limits, waiting, context_lens, texts) = records[0], batch
    num_requests, num_thresholds, context = len(limits), len(THRESHOLDS), 0.0
    for request in range(num_requests):
        context += context_lens[request]
    # Text drafts of undrafted requests: number kept, number gained, and context read for them.
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
    undrafted_seconds, best_rows = seconds[0], float(num_requests)
    for threshold in range(num_thresholds):
        rate = rate_of(num_requests, of_texts[1, threshold], seconds[1 + threshold], fair)
        if rate > undrafted_rate:
            undrafted_rate, best_rows = rate, rows[1 + threshold]
            undrafted_seconds = seconds[1 + threshold]
    row = seconds_at(costs.verify, best_rows + 1.0) - seconds_at(costs.verify, best_rows)
    row, plain_seconds = max(row, 0.0), seconds[0]

    chosen, best_width, best_rate, best_seconds = np.zeros(num_requests, np.bool_), 0, -np.inf, 0.0
    groups = np.full(num_requests, -1)
    if max_draft:
        # The lowest price is that of the longest step, where it depends on the step's seconds.
        longest = block_seconds(costs, float(num_requests * (1 + max_draft)), context)
        price = price_of(num_requests, undrafted_rate, undrafted_seconds + longest, fair)
        groups = drafted_groups(costs, batch, summary, price, row)
    widest = num_able = num_waiting = 0
    for request in range(num_requests):
        if groups[request] >= 0:
            widest = max(widest, min(limits[request], max_draft))
            num_able += 1
            num_waiting += waiting[request]
    # Waiting context has to be stored once, and then pays for many steps.
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
            whole = seconds[step] + drafting
            rate = rate_of(num_requests, gain[step] + of_texts[1, threshold], whole, fair)
            if rate > best_rate:
                best_width, best_rate, best_seconds = width, rate, whole
                for request in range(num_requests):
                    chosen[request] = 0 <= groups[request] <= group
    return Choice(
        drafted=chosen,
        width=best_width,
        rate=best_rate,
        seconds=best_seconds,
        undrafted_rate=undrafted_rate,
        undrafted_seconds=undrafted_seconds,
        plain_rate=plain_rate,
        plain_seconds=plain_seconds,
        row_seconds=row,
    )


class OfferedDrafts(NamedTuple):
    """Drafts that R requests could have verified, and what they must be worth."""

    blocks: Floats
    """Worth of the blocks of requests that were drafted, [D, w]."""
    drafted: Bools
    """Requests that were drafted, [R]."""
    limits: Ints
    """Drafts of each block that can be verified, [R]."""
    texts: Floats
    """Worth of what the text of each predicts, [R, F]; [0, F]: texts predict nothing."""
    context_lens: Ints
    """Tokens of context of each, [R]."""
    price: float
    """Worth that one more second must bring (`objective.price_of`)."""
    row_worth: float
    """Worth that the time of one more row must bring."""
    min_verified: int
    """Drafts of a block to verify, however little they seem worth."""
    is_probe: bool
    """Whether requests that were drafted verify their blocks in any case."""


@compiled
def cut_chains(worth: Floats, limits: Ints, seconds: Floats, price: float) -> Ints:
    """Return how many of each request's drafts to verify; the result is exact.

    Maximises `sum(worth) - price * seconds[count]` over all lengths. At the price of the best step,
    this reaches its rate (Dinkelbach's rule for ratios; for the logarithm, its tangent); what was
    already spent on drafting is sunk. A draft is never worth more than the one before it, so the
    best n are the n that are worth most, and only n has to be searched.

    Args:
        worth: what each draft is worth, less the time that it takes by itself, [R, w].
        limits: drafts of each request that can be verified, [R].
        seconds: time of a step that verifies 0 to C = sum(limits) drafts, [C + 1].
        price: worth that one more second must bring (`objective.price_of`).

    Returns:
        Lengths, [R].
    """
    num_requests, most = len(limits), len(seconds) - 1
    lengths, order = np.zeros(num_requests, np.int64), np.zeros(most, np.int64)
    total, best, count = 0.0, -price * seconds[0], 0
    for number in range(most):
        next_one = -1  # the first request whose next draft is worth most
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
def choose_lengths(records: Records, drafts: OfferedDrafts) -> tuple[Ints, Ints]:
    """Take each request's block or text, whichever is worth more, and cut it to what pays.

    Args:
        records: costs, [1].
        drafts: drafts of R requests.

    Returns:
        How many drafts of each request's block to verify, and of its text, [R]; one of them is 0.
    """
    costs, num_requests, block, most = records[0], len(drafts.drafted), 0, 0
    price, row_worth = drafts.price, drafts.row_worth
    context, width = 0.0, max(drafts.blocks.shape[1], drafts.texts.shape[1])
    worth, limits = np.zeros((num_requests, width)), np.zeros(num_requests, np.int64)
    from_text = np.zeros(num_requests, np.bool_)
    for request in range(num_requests):
        text_value = block_value = 0.0
        if len(drafts.texts):
            for draft in drafts.texts[request]:
                limits[request] += draft > 0.0
                text_value += max(draft - row_worth, 0.0)
        from_text[request] = limits[request] > 0
        curve = drafts.texts[request] if from_text[request] else worth[request]
        if drafts.drafted[request]:
            usable = min(drafts.limits[request], drafts.blocks.shape[1])
            for draft in drafts.blocks[block, :usable]:
                block_value += max(draft - row_worth, 0.0)
            if drafts.is_probe or not from_text[request] or text_value <= block_value:
                curve, limits[request], from_text[request] = drafts.blocks[block], usable, False
            block += 1
        # Attention's time is each draft's own; all else depends on how many drafts there are.
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
