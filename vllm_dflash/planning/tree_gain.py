"""Whether blocks are worth trees, and of which size: what those bring over chains, learned.

A tree holds the chain of likeliest drafts, so each step that verifies trees tells what a chain
would have brought of it, whatever the drafter thought. Its first nodes are the tree that it would
have been with fewer, so the step tells what all smaller trees would have brought, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_dflash.planning import Floats, Ints
from vllm_dflash.planning.step import Outcomes

HOPED = 1.25
"""Accepted drafts of a tree for one of its chain, before any is known. Trees that do not pay at
that are not tried."""
HOPED_TOKENS = 50.0
"""Accepted drafts that the hope is worth."""
MEMORY = 0.999
"""Left of what was accepted, a draft later."""
FORGETTING = 0.998
"""The same, a step without trees of a size later: they are tried again one day."""


class TreeGain:
    """What draft trees of an engine gain."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """For trees of S sizes, ascending: nodes of each."""
        self.sizes = np.array(sizes)
        self._chains, self._trees = np.zeros((2, len(sizes)))

    @property
    def ratios(self) -> Floats:
        """Accepted drafts of trees of each size for one of a whole chain, [S]."""
        return (self._trees + HOPED * HOPED_TOKENS) / (self._chains + HOPED_TOKENS)

    def observe(self, outcomes: Outcomes, accepted: Ints, rest: Floats) -> None:
        """What was accepted of R requests' drafts, [R], and what is expected of the chains in trees
        behind what was verified of them, [R]."""
        if_cut = outcomes.if_cut[:, : len(self.sizes) - 1] - 1
        of_trees = np.column_stack([if_cut, accepted])  # [R, S]
        had_trees = outcomes.if_cut[:, :1] > 0
        tells = had_trees & (outcomes.admitted[:, None] >= self.sizes)
        trees = (of_trees * tells).sum(axis=0)
        chains = ((outcomes.accepted + rest)[:, None] * tells).sum(axis=0)
        left = np.where(tells.any(axis=0), MEMORY**trees, FORGETTING)
        self._chains = left * self._chains + chains
        self._trees = left * self._trees + trees

    def best(self, count: int, promise: float, seconds: Floats, rate: float) -> int | None:
        """Which size brings a step of R requests most tokens a second; None: chains do.

        Args:
            count: R.
            promise: accepted drafts that whole chains would bring.
            seconds: that the step takes with trees of each size, [S].
            rate: tokens a second of the best step with chains.
        """
        rates = (count + promise * self.ratios) / seconds
        best = int(rates.argmax())
        return best if rates[best] > rate else None
