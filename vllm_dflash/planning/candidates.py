"""Which drafted tokens to verify: exact, over any forest of candidates.

Candidates are tokens that could be verified, each behind its parent; a chain has one child each. A
token is accepted only if its parent is, so survival never grows from parent to child.
"""

from __future__ import annotations

import numpy as np

from vllm_dflash.planning import Bools, Floats, Ints
from vllm_dflash.planning.compiled import compiled


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
    order = np.sort(worth)  # the best come last
    total, best, count = 0.0, -price * seconds[0], 0
    for number in range(1, len(worth) + 1):
        total += order[-number]
        value = total - price * seconds[number]
        if value > best:
            best, count = value, number
    chosen = np.zeros(len(worth), dtype=np.bool_)
    if count:
        least = order[-count]
        # Among equals the first ones: a parent comes before the child that is worth as much.
        equals = count - np.sum(worth > least)
        for candidate in range(len(worth)):
            if worth[candidate] == least and equals:
                chosen[candidate] = True
                equals -= 1
            elif worth[candidate] > least:
                chosen[candidate] = True
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
    in_order = np.empty(limits.sum())  # parents before children
    end = 0
    for request in range(len(limits)):
        start, end = end, end + limits[request]
        in_order[start:end] = worth[request, : limits[request]]
    chosen = select(in_order, seconds, price)
    lengths = np.empty(len(limits), dtype=np.int64)
    end = 0
    for request in range(len(limits)):
        start, end = end, end + limits[request]
        lengths[request] = np.sum(chosen[start:end])
    return lengths
