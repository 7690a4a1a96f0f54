"""The best step on V1: searched before drafting, reached by trimming afterwards.

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
from vllm_dflash.planning.forecast import Summary, group_of
from vllm_dflash.planning.objective import price_of, worthiest
from vllm_dflash.planning.thresholds import THRESHOLDS, above_thresholds, best_threshold, summed

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
def worth_above(curve: Floats, toll: float) -> float:
    """Add up what each of w drafts is worth beyond `toll`; those worth less add nothing."""
    total = 0.0
    for worth in curve:
        total += max(worth - toll, 0.0)
    return total


@compiled
def drafted_groups(
    costs: Record, batch: UndraftedBatch, summary: Summary, price: float, row_seconds: float
) -> Ints:
    """Return each request's forecast group, [R]; -1: do not draft it, whatever others do.

    Drafting makes attention cost more, the longer the context is. A request is not drafted if it
    loses by that alone at the lowest price that any step may have, or if its free drafts yield as
    much. If this excludes all requests, all are tried.
    """
    groups, is_worth = np.full(len(batch.limits), -1), np.zeros(len(batch.limits), np.bool_)
    row_price = price * row_seconds
    for request in range(len(groups)):
        if batch.limits[request]:
            group, text = group_of(summary, batch.scores[request]), 0.0
            if len(batch.texts):
                text = worth_above(batch.texts[request], row_price)
            draft_price = costs.attention[1] * price * batch.context_lens[request]
            draft_price += row_price if text else 0.0
            kept, gain, best = summary.kept[group], summary.gain[group], -np.inf
            for threshold in range(kept.shape[0]):
                for width in range(kept.shape[1]):
                    best = max(best, gain[threshold, width] - draft_price * kept[threshold, width])
            groups[request] = group
            block_price = costs.attention[2] * price * batch.context_lens[request]
            is_worth[request] = best - block_price > text
    if is_worth.any():
        groups[~is_worth] = -1
    return groups


@compiled
def best_step(
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
    num_requests, context = len(limits), float(context_lens.sum())
    found = above_thresholds(texts, np.full(len(texts), texts.shape[1]), np.zeros(len(texts)))
    none, free = np.zeros(1), summed(found, np.arange(len(texts)), context_lens)  # [3, T]
    plain_seconds = decoding_seconds(records, num_requests, context, none + num_requests, none)[0]
    plain_rate = num_requests / plain_seconds
    best, undrafted_rate, undrafted_seconds = best_threshold(
        records, num_requests, context, free, 0.0, fair
    )
    rows = num_requests + free[0, best]
    if undrafted_rate <= plain_rate:
        rows, undrafted_rate, undrafted_seconds = 1.0 * num_requests, plain_rate, plain_seconds
    row = max(seconds_at(costs.verify, rows + 1.0) - seconds_at(costs.verify, rows), 0.0)

    chosen, best_width, best_rate, best_seconds = np.zeros(num_requests, np.bool_), 0, -np.inf, 0.0
    groups = np.full(num_requests, -1)
    if max_draft:
        # The lowest price is that of the longest step, where it depends on the step's seconds.
        most_rows = float(num_requests * (1 + max_draft))
        longest = block_seconds(costs, most_rows, context)
        price = price_of(num_requests, undrafted_rate, undrafted_seconds + longest, fair)
        groups = drafted_groups(costs, batch, summary, price, row)
    widest = num_able = num_waiting = 0
    for request in np.flatnonzero(groups >= 0):
        widest = max(widest, min(limits[request], max_draft))
        num_able += 1
        num_waiting += waiting[request]
    # Waiting context has to be stored once, and then pays for many steps.
    rows_to_store = 1 + num_waiting / max(num_able, 1) / CATCH_UP_STEPS
    drafts, count, drafted_context = np.zeros((widest, 3, len(THRESHOLDS))), 0, 0.0
    for group in range(len(summary.kept)):  # the best ones first
        members = np.flatnonzero(groups == group)
        count += len(members)
        for request in members:
            drafted_context += context_lens[request]
        free -= summed(found, members[: len(texts)], context_lens)
        storing = seconds_at(costs.context, count * rows_to_store)
        for width in range(widest if count else 0):
            for threshold in range(len(THRESHOLDS)):
                drafts[width, 0, threshold] += len(members) * summary.kept[group, threshold, width]
                drafts[width, 1, threshold] += len(members) * summary.gain[group, threshold, width]
            drafts[width, 2] = drafts[width, 0] * (drafted_context / count)
            drafting = block_seconds(costs, float(count * (2 + width)), drafted_context) + storing
            _, rate, seconds = best_threshold(
                records, num_requests, context, free + drafts[width], drafting, fair
            )
            if rate > best_rate:
                best_width, best_rate, best_seconds = 1 + width, rate, seconds
                chosen = (groups >= 0) & (groups <= group)
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

    Maximises `sum(worth) - price * seconds[count]` over all lengths. What was already spent on
    drafting is sunk. A draft is never worth more than the one before it, so the best n are the n
    that are worth most, and only n has to be searched.

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
    gain = np.zeros(most + 1)
    for number in range(most):
        next_one = -1  # the first request whose next draft is worth most
        for request in range(num_requests):
            length = lengths[request]
            if length < limits[request] and (
                next_one < 0 or worth[request, length] > worth[next_one, lengths[next_one]]
            ):
                next_one = request
        gain[number + 1] = gain[number] + worth[next_one, lengths[next_one]]
        lengths[next_one] += 1
        order[number] = next_one
    for number in range(worthiest(gain, seconds, price), most):
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
    costs, num_requests, block = records[0], len(drafts.drafted), 0
    width = max(drafts.blocks.shape[1], drafts.texts.shape[1])
    worth, limits = np.zeros((num_requests, width)), np.zeros(num_requests, np.int64)
    from_text = np.zeros(num_requests, np.bool_)
    for request in range(num_requests):
        curve = worth[request]
        if len(drafts.texts):
            curve = drafts.texts[request]
            limits[request] = (curve > 0.0).sum()
        from_text[request] = limits[request] > 0
        if drafts.drafted[request]:
            usable = drafts.blocks[block, : drafts.limits[request]]
            text_value = worth_above(curve, drafts.row_worth)
            is_better = worth_above(usable, drafts.row_worth) >= text_value
            if drafts.is_probe or is_better or not from_text[request]:
                curve, limits[request], from_text[request] = usable, len(usable), False
            block += 1
        # Attention's time is each draft's own; all else depends on how many drafts there are.
        reading = drafts.price * costs.attention[1] * drafts.context_lens[request]
        for position in range(limits[request]):
            worth[request, position] = curve[position] - reading
    rows = num_requests + np.arange(1.0 + limits.sum())
    context = float(drafts.context_lens.sum())
    seconds = decoding_seconds(records, num_requests, context, rows, np.zeros(len(rows)))
    lengths = cut_chains(worth, limits, seconds, drafts.price)
    blocks, texts = np.zeros(num_requests, np.int64), np.zeros(num_requests, np.int64)
    for request in range(num_requests):
        if from_text[request]:
            texts[request] = lengths[request]
        elif drafts.drafted[request]:
            blocks[request] = max(lengths[request], min(limits[request], drafts.min_verified))
    return blocks, texts
