"""Which drafted tokens to verify: exact, over any forest of candidates.

Candidates are tokens that could be verified, each behind its parent; a chain has one child each. A
token is accepted only if its parent is, so survival never grows from parent to child.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_dflash.planning import Bools, Floats, Ints, Records
from vllm_dflash.planning.compiled import compiled
from vllm_dflash.planning.work import many_decoding_seconds


@compiled
def select(worth: Floats, seconds: Floats, price: float) -> Bools:
    """The set of candidates whose expected tokens are most worth their time.

    Maximises `sum(worth) - price * seconds[count]` over all sets that hold the parent of each
    member. With price the best rate that can be had (tokens per second), this is the set that
    attains it (Dinkelbach's rule for ratios), and what was already spent on drafting is sunk.

    A token is never worth more than its parent, so the best set of n candidates is the n that are
    worth most, and only n has to be searched.

    Args:
        worth: of each candidate: its survival, or less where it costs time of its own, [C].
        seconds: time of a step that verifies 0 to C of them, [C + 1].
        price: expected tokens a second is worth.

    Returns:
        Chosen or not, [C].
    """
    best_first = -np.sort(-worth)
    total, best, count = 0.0, -price * seconds[0], 0
    for number in range(len(worth)):
        total += best_first[number]
        value = total - price * seconds[number + 1]
        if value > best:
            best, count = value, number + 1
    least = best_first[count - 1] if count else np.inf
    equals = count  # of those that are worth just the least, so many are chosen
    for candidate in range(len(worth)):
        equals -= worth[candidate] > least
    chosen = np.zeros(len(worth), dtype=np.bool_)
    for candidate in range(len(worth)):
        # Among equals the first ones: a parent comes before the child that is worth as much.
        is_equal = worth[candidate] == least and equals > 0
        equals -= is_equal
        chosen[candidate] = is_equal or worth[candidate] > least
    return chosen


@compiled
def cut_chains(worth: Floats, limits: Ints, seconds: Floats, price: float) -> Ints:
    """How many of each request's drafts to verify: one chain of candidates per request.

    Args:
        worth: of each draft, never growing along a row, [D, w].
        limits: drafts of each request that can be verified, [D].
        seconds: time of a step that verifies 0 to C = sum(limits) of them, [C + 1].
        price: expected tokens a second is worth.

    Returns:
        Lengths, [D].
    """
    in_order, candidate = np.empty(len(seconds) - 1), 0  # parents before children
    for request in range(len(limits)):
        for position in range(limits[request]):
            in_order[candidate] = worth[request, position]
            candidate += 1
    chosen, candidate = select(in_order, seconds, price), 0
    lengths = np.zeros(len(limits), dtype=np.int64)
    for request in range(len(limits)):
        for _ in range(limits[request]):
            lengths[request] += chosen[candidate]
            candidate += 1
    return lengths


@compiled
def cut(
    records: Records,
    curves: Floats,
    limits: Ints,
    context_lens: Ints,
    drafted: Bools,
    price: float,
) -> Ints:
    """How many drafts of each request are worth their time, [D].

    Args:
        records: costs, [1].
        curves: survival of the drafts, [D, w].
        limits: drafts of each request that can be verified, [R].
        context_lens: tokens of context of each, [R].
        drafted: which of the R are the D.
        price: expected tokens a second is worth.
    """
    costs, num_requests = records[0], len(drafted)
    usable = np.empty(len(curves), dtype=np.int64)
    worth = curves.copy()
    number, candidates, context = 0, 0, 0.0
    for request in range(num_requests):
        context += context_lens[request]
        if drafted[request]:
            usable[number] = min(limits[request], curves.shape[1])
            candidates += usable[number]
            # What attention takes for a draft is its own; all else depends on how many there are.
            reading = price * costs.attention[1] * context_lens[request]
            for position in range(curves.shape[1]):
                worth[number, position] -= reading
            number += 1
    rows = np.empty(candidates + 1)
    for count in range(candidates + 1):
        rows[count] = num_requests + count
    seconds = many_decoding_seconds(costs, num_requests, rows, context, 0.0)
    return cut_chains(worth, usable, seconds, price)


class Lengths(NamedTuple):
    """Drafts to verify of each request, by where they come from; of one source each."""

    blocks: Ints
    """[R]."""
    texts: Ints
    """[R]."""


@compiled
def choose_lengths(
    records: Records,
    curves: Floats,
    drafted: Bools,
    limits: Ints,
    free: Floats,
    free_lengths: Ints,
    context_lens: Ints,
    price: float,
    row_seconds: float,
    least: int,
    is_probe: bool,
) -> Lengths:
    """Whose drafts to verify, and how many of each.

    Args:
        records: costs, [1].
        curves, drafted, limits, free, free_lengths, is_probe: see `choose_sources`.
        context_lens: tokens of context of each request, [R].
        price: expected tokens a second is worth.
        row_seconds: what one more row takes.
        least: drafts of a block to verify whatever they seem worth.
    """
    chosen = choose_sources(
        curves, drafted, limits, free, free_lengths, price * row_seconds, is_probe
    )
    lengths = cut(records, chosen.curves, chosen.limits, context_lens, chosen.have_drafts, price)
    blocks, texts = np.zeros((2, len(drafted)), np.int64)
    number = 0
    for request in range(len(drafted)):
        if not chosen.have_drafts[request]:
            continue
        if chosen.from_text[request]:
            texts[request] = lengths[number]
        else:
            blocks[request] = max(lengths[number], min(chosen.limits[request], least))
        number += 1
    return Lengths(blocks, texts)


class Sources(NamedTuple):
    """Drafts of D requests, each from the source that promises more."""

    curves: Floats
    """Survival, [D, w]."""
    have_drafts: Bools
    """Which of the R requests are the D."""
    limits: Ints
    """Drafts of each that can be verified, [R]."""
    from_text: Bools
    """Whether they are free ones, [R]."""


@compiled
def choose_sources(
    curves: Floats,
    drafted: Bools,
    limits: Ints,
    free: Floats,
    free_lengths: Ints,
    row_worth: float,
    is_probe: bool,
) -> Sources:
    """Of a request's block and what its text foretells, take what is worth more.

    Args:
        curves: survival of the blocks, of those who were drafted, [B, w].
        drafted: which of the R were.
        limits: drafts of their blocks that can be verified, [R].
        free: survival of free drafts, [R, F].
        free_lengths: how many there are, [R]; none of both, [0], where texts foretell nothing.
        row_worth: tokens that the time of one more row is worth.
        is_probe: whether those who were drafted verify their blocks in any case.
    """
    num_requests, width = len(drafted), max(curves.shape[1], free.shape[1])
    chosen = np.zeros((num_requests, width))
    from_text, have_drafts = np.zeros(num_requests, np.bool_), np.zeros(num_requests, np.bool_)
    usable, block, count = np.zeros(num_requests, np.int64), 0, 0
    for request in range(num_requests):
        number = free_lengths[request] if len(free) else 0
        free_value = block_value = 0.0
        for position in range(number):
            free_value += max(free[request, position] - row_worth, 0.0)
        if drafted[request]:
            most = min(limits[request], curves.shape[1])
            for position in range(most):
                block_value += max(curves[block, position] - row_worth, 0.0)
            if is_probe or not number or free_value <= block_value:
                chosen[count, : curves.shape[1]] = curves[block]
                usable[request], number = most, 0
                have_drafts[request] = True
                count += 1
            block += 1
        if number:
            chosen[count, :number] = free[request, :number]
            usable[request] = number
            have_drafts[request] = from_text[request] = True
            count += 1
    return Sources(chosen[:count], have_drafts, usable, from_text)
