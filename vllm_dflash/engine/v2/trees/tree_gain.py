"""Learns whether trees pay over chains, and of which size.

A tree holds the chain of most likely drafts. So each step that verifies trees tells what a chain
would have yielded, whatever the drafter thought. Its first nodes are the tree that it would have
been with fewer, so the step also tells what all smaller trees would have yielded.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_dflash.planning import Floats, Ints
from vllm_dflash.planning.search import first_best, rate_of
from vllm_dflash.planning.step import Outcomes, Plan

ASSUMED_RATIO = 1.25
"""Accepted drafts of a tree for each one of its chain, assumed before any is known. Trees that do
not pay at that ratio are not tried."""
ASSUMED_TOKENS = 50.0
"""Accepted drafts that this assumption is worth."""
MEMORY = 0.999
"""What is left of earlier counts after one more accepted draft."""
FORGETTING = 0.998
"""The same, after a step without trees of a size: they are tried again one day."""


class TreeGain:
    """What draft trees of an engine gain over chains."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """Learn about trees of S sizes: number of nodes of each, ascending."""
        self.sizes = np.array(sizes)
        self._chains, self._trees = np.zeros((2, len(sizes)))

    @property
    def ratios(self) -> Floats:
        """Accepted drafts of trees of each size for each one of a full chain, [S]."""
        return (self._trees + ASSUMED_RATIO * ASSUMED_TOKENS) / (self._chains + ASSUMED_TOKENS)

    def record_step(
        self, outcomes: Outcomes, accepted: Ints, rest: Floats, *, steps: int = 1
    ) -> None:
        """Learn from R requests: their accepted drafts, [R], and what is expected of the trees'
        chains after the drafts that were verified, [R]. `steps`: since the last call."""
        tokens_if_truncated = outcomes.tokens_if_truncated[:, : len(self.sizes) - 1] - 1
        of_trees = np.column_stack([tokens_if_truncated, accepted])  # [R, S]
        had_trees = outcomes.tokens_if_truncated[:, :1] > 0
        is_informative = had_trees & (outcomes.admitted[:, None] >= self.sizes)
        trees = (of_trees * is_informative).sum(axis=0)
        chains = ((outcomes.accepted + rest)[:, None] * is_informative).sum(axis=0)
        left = np.where(is_informative.any(axis=0), MEMORY**trees, FORGETTING**steps)
        self._chains = left * self._chains + chains
        self._trees = left * self._trees + trees

    def best(self, plan: Plan, seconds: Floats) -> int | None:
        """Return which size has the best rate in a step; None: the plan's chains have.

        `seconds`: time of the step with trees of each size, [S].
        """
        count = len(plan.drafted)
        # Trees are made of blocks; drafts of texts remain chains.
        per_request = np.log1p(self.ratios * np.expm1(plan.of_blocks / count))
        rates = rate_of(count, count * per_request + plan.of_texts, seconds)
        best = first_best(rates)
        return best if rates[best] > plan.rate else None


def rest_of_chains(outcomes: Outcomes, ratio: Floats) -> Floats:
    """Estimate how many more drafts of each block's chain would have been accepted, [R].

    If all verified drafts of the chain were accepted, this is the expectation of the rest;
    otherwise it is 0. `ratio`: accepted drafts of each request for each expected one, [R].
    """
    draft = np.arange(outcomes.confidence.shape[1])
    is_rest = draft >= outcomes.verified_in_chain[:, None]
    survival = np.where(is_rest, outcomes.confidence, 1.0).cumprod(axis=1)
    is_accepted = outcomes.accepted == outcomes.verified_in_chain
    rest: Floats = is_accepted * (np.minimum(survival * ratio[:, None], 1.0) * is_rest).sum(axis=1)
    return rest
