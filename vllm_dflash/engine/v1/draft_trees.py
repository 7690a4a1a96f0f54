"""Draft trees: the scheduler knows lists of tokens, the worker knows how they hang together.

Drafts go to the scheduler as one list, parents first, so that wherever it cuts the tail off
(budget, context limit) a tree is left. Each request's tree is kept here until that list comes back
to be verified. A list that is not the kept tree's is a chain, which is lossless whatever is in it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from vllm_dflash.engine.block_layout import Ints
from vllm_dflash.engine.v1.tree_layout import (
    PathRows,
    ancestors,
    chain_length,
    depths,
    other_paths,
    path_rows,
)
from vllm_dflash.planning import Bools
from vllm_dflash.planning.draft_tree import accepted_path, fate_of_chain
from vllm_dflash.planning.step import Likeliest, Step
from vllm_dflash.planning.tree_acceptance import UNKNOWN, chain_chances


@dataclass(frozen=True)
class KeptTree:
    """Drafts of a request, from being made to being verified."""

    tokens: Ints
    """[n]."""
    parents: Ints
    """[n]."""
    is_first: Bools
    """Whether each node and all before it are the likeliest of their places, [n]."""
    candidates: Ints
    """Of each place, behind likeliest tokens, likeliest first, [w, C]."""

    def cut(self, length: int) -> KeptTree:
        """Its first nodes."""
        return KeptTree(
            self.tokens[:length], self.parents[:length], self.is_first[:length], self.candidates
        )

    @property
    def is_chain(self) -> bool:
        """Whether nothing branches."""
        return chain_length(self.parents) == len(self.parents)


@dataclass
class VerifiedTrees:
    """The trees of a step that verifies any which are no chains."""

    trees: dict[int, KeptTree]
    """By request of the batch."""
    starts: Ints
    """Row of the bonus token of each request of the batch, [R]."""
    context_lens: Ints
    """Tokens before that, [R]; for `turns`."""
    node_rows: Ints
    """Rows of all nodes, tree by tree, [N]."""
    root_rows: Ints
    """Row of the bonus token of each of them, [N]."""
    depths: Ints
    """Of each of them, [N]."""
    paths: dict[int, list[int]] = field(default_factory=dict)
    """Accepted nodes of each, once that is known."""

    @classmethod
    def of(cls, trees: dict[int, KeptTree], starts: Ints, context_lens: Ints) -> VerifiedTrees:
        """Lay out trees of requests of a batch."""
        roots = [np.full(len(tree.tokens), starts[r], np.int64) for r, tree in trees.items()]
        rows = [root + 1 + np.arange(len(root)) for root in roots]
        return cls(
            trees,
            starts,
            context_lens,
            np.concatenate(rows),
            np.concatenate(roots),
            np.concatenate([depths(tree.parents) for tree in trees.values()]),
        )

    @property
    def ancestors(self) -> npt.NDArray[np.uint64]:
        """See `tree_layout.ancestors`, [N]."""
        return np.concatenate([ancestors(tree.parents) for tree in self.trees.values()])

    @cached_property
    def turns(self) -> list[PathRows]:
        """Attention in turns, for a kernel that reads one path at a time."""
        paths = {request: other_paths(tree.parents) for request, tree in self.trees.items()}
        return path_rows(paths, self.starts, self.context_lens)

    def descend(self, sampled: Ints) -> Iterator[tuple[int, Ints]]:
        """Follow what the target writes; afterwards `paths` are known.

        Args:
            sampled: behind the bonus token and behind each node, tree by tree, [trees + N].

        Yields:
            A request, and the tokens that it gets.
        """
        end = 0
        for request, tree in self.trees.items():
            start, end = end, end + 1 + len(tree.tokens)
            written = sampled[start:end]
            path = self.paths[request] = accepted_path(tree.parents, tree.tokens, written)
            yield request, written[[0, *(1 + node for node in path)]]

    def order(self, num_rows: int) -> Ints:
        """Which row of the step belongs in the place of each, [num_rows]: accepted nodes in those
        of the chain that they have become."""
        order = np.arange(num_rows)
        rows, places = self.accepted_rows()
        order[places] = rows
        return order

    def accepted_rows(self) -> tuple[Ints, Ints]:
        """Rows of the accepted nodes, and the rows in whose places they belong, tree by tree."""
        rows: list[int] = []
        places: list[int] = []
        for request, path in self.paths.items():
            first = int(self.starts[request]) + 1
            rows += [first + node for node in path]
            places += range(first, first + len(path))
        return np.array(rows, np.int64), np.array(places, np.int64)


class DraftTrees:
    """Trees of one worker's requests."""

    def __init__(self, budget: int) -> None:
        """Of up to so many nodes each."""
        self.budget = budget
        self._kept: dict[str, KeptTree] = {}
        self._verified: dict[int, KeptTree] = {}
        """What this step verifies, chains too, by request of the batch."""
        self.step: VerifiedTrees | None = None
        """Those that are no chains, if there are any."""

    def keep(self, step: Step) -> list[list[int]]:
        """Remember the drafts of a step's D drafted requests; returns them, [D]."""
        candidates, trees = step.candidates, step.trees
        assert candidates is not None
        assert trees is not None
        drafted = step.plan.drafted
        lengths = np.where(step.from_text, 0, step.lengths)[drafted]
        ids = [step.ids[request] for request in np.flatnonzero(drafted)]
        _, order = chain_chances(candidates.chances)
        likeliest = np.take_along_axis(candidates.tokens, order, axis=2)  # [D, w, C]
        drafts = []
        for block, (name, length) in enumerate(zip(ids, lengths.tolist(), strict=True)):
            places, choices = trees.places[block, :length], trees.choices[block, :length]
            tokens = candidates.tokens[block, places, choices]
            self._kept[name] = KeptTree(
                tokens,
                trees.parents[block, :length],
                trees.is_first[block, :length],
                likeliest[block],
            )
            drafts.append(tokens.tolist())
        return drafts

    def forget(self, names: Iterable[str]) -> None:
        """Whatever is verified of these requests next is not what was drafted."""
        for name in names:
            self._kept.pop(name, None)

    def first_tokens(self, name: str, count: int) -> list[int]:
        """Of a request's kept tree, for a scheduler that knows how many it verifies, not which."""
        kept = self._kept.get(name)
        if kept is None or count > len(kept.tokens):
            return []
        return kept.tokens[:count].tolist()

    def begin(
        self,
        ids: Sequence[str],
        drafts: Sequence[Sequence[int]],
        starts: Ints,
        context_lens: Ints,
        alive: Container[str],
    ) -> VerifiedTrees | None:
        """A step verifies drafts.

        Args:
            ids: of its R requests.
            drafts: of each, as the scheduler gives them, [R].
            starts: row of each request's first token, [R].
            context_lens: tokens before that, [R].
            alive: requests that are not over; drafts of some may wait.

        Returns:
            The trees among them that are no chains, if any.
        """
        self._verified = {}
        for request, name in enumerate(ids):
            kept, given = self._kept.pop(name, None), drafts[request]
            if kept is not None and given and kept.tokens[: len(given)].tolist() == given:
                self._verified[request] = kept.cut(len(given))
        self._kept = {name: tree for name, tree in self._kept.items() if name in alive}
        branching = {r: tree for r, tree in self._verified.items() if not tree.is_chain}
        self.step = VerifiedTrees.of(branching, starts, context_lens) if branching else None
        return self.step

    def fate(self, sampled: Ints, produced: Ints) -> Likeliest:
        """What became of the likeliest tokens among what this step verified.

        Args:
            sampled: tokens of each request, then -1, [R, most of any].
            produced: how many count, [R].
        """
        verified, accepted = np.zeros((2, len(produced)), np.int64)
        missed = np.full(len(produced), UNKNOWN)
        for request, tree in self._verified.items():
            if not produced[request]:
                continue
            verified[request] = count = int(tree.is_first.sum())
            wrote = sampled[request, : min(count, int(produced[request]))]
            accepted[request], missed[request] = fate_of_chain(tree.candidates, wrote)
        return Likeliest(verified, accepted, missed)
