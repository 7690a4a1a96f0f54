"""Draft trees: of all that a block predicts, the tokens that are likeliest to be accepted.

A block gives a distribution at each of its places, and a chain takes one token of each. A tree has
several, each behind its parent, which is the bonus token or a token of the place before (as in
liranringel/ddtree). A node is accepted if its parent is and the target writes the node's token
there. So the best n nodes are found best first, and the best n are the first n of more: a tree is
cut as a chain is, by length.
"""

from __future__ import annotations

import heapq

import numpy as np

from vllm_dflash.planning import Bools, Floats, Ints
from vllm_dflash.planning.chances import rate_at
from vllm_dflash.planning.compiled import compiled
from vllm_dflash.planning.step import Candidates, Trees

MOST_CANDIDATES = 8
"""Tokens of a place that are looked at."""


@compiled
def calibrated(
    chances: Floats, place: int, rates: Floats, rank_rates: Floats
) -> tuple[Ints, Floats]:
    """Candidates of a place, likeliest first, and how likely the target is to write each, [C] each.

    Args:
        chances: by the drafter, [C].
        place: of the block.
        rates: of the likeliest, by place and confidence, [K, knots].
        rank_rates: of the others, by rank and confidence, [C, knots].
    """
    order = np.argsort(-chances, kind="mergesort")
    found, total = np.empty(len(order)), 0.0
    for rank in range(len(order)):
        row = rates[place] if rank == 0 else rank_rates[min(rank, len(rank_rates) - 1)]
        found[rank] = rate_at(row, chances[order[rank]])
        if chances[order[rank]] <= 0.0:
            found[rank] = 0.0
        total += found[rank]
    if total > 1.0:  # only one of them can be written
        for rank in range(1, len(order)):
            found[rank] *= max(1.0 - found[0], 0.0) / max(total - found[0], 1e-12)
    return order, found


@compiled
def grow(
    candidates: Candidates, limits: Ints, bias: Floats, rates: Floats, rank_rates: Floats
) -> Trees:
    """The trees of the likeliest nodes of each request.

    Args:
        candidates: of D requests.
        limits: places of each block that can be used, [D].
        bias: by which survival is corrected, [D].
        rates, rank_rates: see `calibrated`.
    """
    chances = candidates.chances
    num_requests, width, num_before, num_candidates = chances.shape
    columns = max(candidates.budget, width)
    lengths = np.zeros(num_requests, np.int64)
    parents = np.full((num_requests, columns), -1, np.int64)
    places, choices = np.zeros_like(parents), np.zeros_like(parents)
    survival = np.zeros((num_requests, columns))
    is_first = np.zeros((num_requests, columns), np.bool_)
    most = 1 + columns * num_candidates
    # What could be a node: its survival by the drafter, parent, place, choice, and rank.
    value, about = np.empty(most), np.empty((most, 4), np.int64)
    for request in range(num_requests):
        count, usable = 0, min(limits[request], width)
        branches = candidates.may_branch[request]
        budget = candidates.budget if branches else usable
        heap = [(0.0, -1)]
        heap.pop()
        node, reached = -1, 1.0  # the bonus token
        while lengths[request] < budget:
            place = places[request, node] + 1 if node >= 0 else 0
            if place < usable:
                before = 0
                if num_before > 1 and node >= 0:
                    before = choices[request, node]
                order, found = calibrated(chances[request, place, before], place, rates, rank_rates)
                for rank in range(num_candidates if branches else 1):
                    if found[rank] <= 0.0:
                        continue
                    value[count] = reached * found[rank]
                    about[count, 0], about[count, 1] = node, place
                    about[count, 2], about[count, 3] = order[rank], rank
                    heapq.heappush(heap, (-value[count], count))
                    count += 1
            if not heap:
                break
            best = heapq.heappop(heap)[1]
            node, reached = lengths[request], value[best]
            parent = about[best, 0]
            parents[request, node], places[request, node] = parent, about[best, 1]
            choices[request, node] = about[best, 2]
            survival[request, node] = min(reached * bias[request], 1.0)
            is_first[request, node] = about[best, 3] == 0 and (
                parent < 0 or is_first[request, parent]
            )
            lengths[request] += 1
    return Trees(lengths, parents, places, choices, survival, is_first)


@compiled
def chains_in(is_first: Bools, lengths: Ints) -> Ints:
    """Likeliest tokens of their places among the first nodes of each tree, [D].

    Args:
        is_first: of `Trees`, [D, n].
        lengths: nodes of each that count, [D].
    """
    found = np.zeros(len(lengths), np.int64)
    for tree in range(len(lengths)):
        for node in range(lengths[tree]):
            found[tree] += is_first[tree, node]
    return found


def accepted_path(parents: Ints, tokens: Ints, sampled: Ints) -> list[int]:
    """Nodes on the way of what the target writes, from the bonus token's child on.

    Args:
        parents: -1 for the bonus token, [n].
        tokens: of the nodes, [n].
        sampled: what the target writes behind the bonus token and behind each node, [1 + n].
    """
    path: list[int] = []
    node = -1
    while True:
        children = np.flatnonzero((parents == node) & (tokens == sampled[1 + node]))
        if not len(children):
            return path
        node = int(children[0])
        path.append(node)


def fate_of_chain(candidates: Ints, wrote: Ints) -> tuple[int, int]:
    """What became of a chain of likeliest tokens.

    Args:
        candidates: of each place, likeliest first, [w, C].
        wrote: what the target wrote in the places of the chain's tokens, as far as it got.

    Returns:
        How many came true, and which candidate it wrote in the place of the next; C if that is none
        of them or there was none.
    """
    differs = np.flatnonzero(candidates[: len(wrote), 0] != wrote)
    if not len(differs):
        return len(wrote), candidates.shape[1]
    first = int(differs[0])
    ranks = np.flatnonzero(candidates[first] == wrote[first])
    return first, int(ranks[0]) if len(ranks) else candidates.shape[1]
