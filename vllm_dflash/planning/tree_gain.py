"""Whether blocks are worth trees: what those bring over chains, learned, and what rows take.

A tree holds the chain of likeliest drafts, so each step that verifies trees tells what a chain
would have brought of it: how many more were accepted is known, whatever the drafter thought.
"""

from __future__ import annotations

from vllm_dflash.planning import Bools, Ints
from vllm_dflash.planning.costs import StepCosts

HOPED = 1.25
"""Accepted drafts of a tree for one of its chain, before any is known. Trees that do not pay at
that are not tried."""
HOPED_TOKENS = 50.0
"""Accepted drafts that the hope is worth."""
MEMORY = 0.999
"""Left of what was accepted, a draft later."""
FORGETTING = 0.998
"""The same, a step without trees later: they are tried again one day."""


class TreeGain:
    """Of one engine."""

    def __init__(self) -> None:
        self._chains = self._trees = 0.0

    @property
    def ratio(self) -> float:
        """Accepted drafts of trees for each of their chains; above 1."""
        return (self._trees + HOPED * HOPED_TOKENS) / (self._chains + HOPED_TOKENS)

    def observe(self, of_trees: Ints, of_chains: Ints, had_trees: Bools) -> None:
        """What was accepted of R requests' trees, and of the chains in them; which had any, [R]."""
        if not had_trees.any():
            self._chains *= FORGETTING
            self._trees *= FORGETTING
            return
        trees, chains = float(of_trees[had_trees].sum()), float(of_chains[had_trees].sum())
        left = MEMORY**trees
        self._chains = left * self._chains + chains
        self._trees = left * self._trees + trees

    def pays(
        self,
        costs: StepCosts,
        num_nodes: Ints,
        context_lens: Ints,
        promise: float,
        rate: float,
        block_rows: int,
    ) -> bool:
        """Whether a step brings more tokens a second with trees.

        Args:
            costs: of steps.
            num_nodes: places for drafts of each request with trees, [R].
            context_lens: tokens of context of each, [R].
            promise: accepted drafts that whole chains would bring.
            rate: tokens a second of the best step with chains.
            block_rows: of the drafter's block.
        """
        count, context = len(num_nodes), float(context_lens.sum())
        rows = count + num_nodes.sum(keepdims=True)
        reading = float((num_nodes * context_lens).sum())
        seconds = float(costs.decoding(count, rows, context, reading)[0])
        seconds += costs.block(block_rows, context)
        return bool((count + promise * self.ratio) / seconds > rate)
