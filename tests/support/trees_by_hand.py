"""Draft trees, grown and walked by hand: plain Python, one request at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

Floats = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Tree:
    """Nodes in their order; -1 stands for the bonus token."""

    tokens: list[int]
    parents: list[int]
    ways: list[tuple[int, ...]]
    """Ranks of the candidates from the bonus token down to each node."""
    survival: list[float]

    @property
    def depths(self) -> list[int]:
        return [len(way) for way in self.ways]

    @property
    def masks(self) -> list[int]:
        """Bits of the nodes that each node sees."""
        found: list[int] = []
        for number, parent in enumerate(self.parents):
            found.append((1 << number) | (found[parent] if parent >= 0 else 0))
        return found

    @property
    def most_likely(self) -> int:
        """Bits of the nodes in the chain of most likely candidates."""
        return sum(1 << number for number, way in enumerate(self.ways) if not any(way))


def chances_of(probabilities: Floats) -> list[list[float]]:
    """Return chances of candidates, from the drafter's probabilities, most likely first, [K, C]."""
    return [
        [of_place[0], *(min(one, of_place[0]) for one in of_place[1:])]
        for of_place in probabilities
    ]


def grown(tokens: Sequence[Sequence[int]], chances: Floats, num_nodes: int, last: int) -> Tree:
    """Return the most likely nodes of all, best first.

    Args:
        tokens: candidates of each place, [K, C].
        chances: of these, [K, C].
        num_nodes: N; if there are fewer, the last token is put after the bonus token.
        last: that token.
    """
    survival: dict[tuple[int, ...], float] = {}
    reached: dict[tuple[int, ...], float] = {(): 1.0}
    for of_place in chances:
        # If a depth has more than N nodes, the others are not among the N best of all.
        nodes = {
            (*way, rank): before * chance
            for (way, before), (rank, chance) in product(reached.items(), enumerate(of_place))
            if before * chance > 0.0
        }
        best = sorted(nodes, key=lambda way: -nodes[way])[:num_nodes]
        reached = {way: nodes[way] for way in best}
        survival |= reached
    order = sorted(survival, key=lambda way: (-survival[way], len(way), way))[:num_nodes]
    place = {way: number for number, way in enumerate(order)}
    missing = num_nodes - len(order)
    return Tree(
        [tokens[len(way) - 1][way[-1]] for way in order] + [last] * missing,
        [place[way[:-1]] if len(way) > 1 else -1 for way in order] + [-1] * missing,
        order + [(-1,)] * missing,
        [survival[way] for way in order] + [0.0] * missing,
    )


def path_of(tree: Tree, drawn: Sequence[int], size: int | None = None) -> list[int]:
    """Return accepted nodes of the first `size`; `drawn` is after the bonus token and each node."""
    path: list[int] = []
    node = -1
    while True:
        children = [
            number
            for number in range(len(tree.tokens) if size is None else size)
            if tree.parents[number] == node and tree.tokens[number] == drawn[1 + node]
        ]
        if not children:
            return path
        node = children[0]
        path.append(node)
