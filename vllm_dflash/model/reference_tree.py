"""Draft trees in plain Python: the likeliest continuations of a block, one heap, no tricks."""

from __future__ import annotations

import heapq
from typing import NamedTuple

import torch

from vllm_dflash.model.reference import ReferenceDrafter
from vllm_dflash.planning.draft_tree import MOST_CANDIDATES


class Node(NamedTuple):
    """A drafted token and what stands before it."""

    parent: int
    """Index in the tree; -1: the bonus token."""
    token: int


def successors(
    drafter: ReferenceDrafter,
    logits: torch.Tensor,  # [V'], of the place
    hidden: torch.Tensor,  # [H], of the place
    before: int,
) -> list[tuple[int, float]]:
    """Tokens of a place behind a token, and the probability of each by the drafter.

    Which tokens these are depends on the place alone; DFlash 2 says itself how many.
    """
    selector = drafter.candidate_selector
    if selector is None:
        likeliest = logits.float().softmax(-1).topk(min(MOST_CANDIDATES, len(logits)))
        tokens, chances = drafter.target_ids(likeliest.indices), likeliest.values
    else:
        best = logits.topk(selector.top_k)
        scores = selector.scores(best.indices, best.values, hidden, torch.tensor(before))
        tokens, chances = best.indices, scores.float().softmax(-1)
    return list(zip(tokens.tolist(), chances.tolist(), strict=True))


def likeliest_tree(
    drafter: ReferenceDrafter,
    logits: torch.Tensor,  # [K, V']
    hidden: torch.Tensor,  # [K, H]
    bonus: int,
    num_nodes: int,
) -> list[Node]:
    """The nodes that are likeliest to be accepted if the drafter is right, best first."""
    tree: list[Node] = []
    found = 0
    # Less likely, when it was found, parent, token, place.
    heap: list[tuple[float, int, int, int, int]] = []
    survival, node, token, place = 1.0, -1, bonus, -1
    while len(tree) < num_nodes:
        if place + 1 < len(logits):
            for child, chance in successors(drafter, logits[place + 1], hidden[place + 1], token):
                heapq.heappush(heap, (-survival * chance, found, node, child, place + 1))
                found += 1
        if not heap:
            break
        negative, _, parent, token, place = heapq.heappop(heap)
        survival, node = -negative, len(tree)
        tree.append(Node(parent, token))
    return tree


def child(tree: list[Node], parent: int, token: int) -> int | None:
    """The node behind `parent` that is this token."""
    wanted = Node(parent, token)
    return tree.index(wanted) if wanted in tree else None
