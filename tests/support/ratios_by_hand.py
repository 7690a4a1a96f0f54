"""Ratios of accepted to expected drafts, as V2's device keeps them, in numpy."""

from __future__ import annotations

import numpy as np

from vllm_dflash.planning import Floats, Ints
from vllm_dflash.planning.acceptance import GLOBAL_MEMORY, PRIOR_TOKENS, REQUEST_MEMORY


class Ratios:
    """Ratios of `num_rows` requests."""

    def __init__(self, num_rows: int) -> None:
        self.requests = np.zeros((num_rows, 2))
        self.overall = np.zeros(2)

    def forget(self, rows: Ints) -> None:
        self.requests[rows] = 0.0

    def record(self, rows: Ints, expected: Floats, accepted: Ints) -> None:
        """Learn from expected and accepted tokens of D requests, [D] each, no row twice."""
        both = np.stack([expected, accepted], axis=1)
        self.requests[rows] = REQUEST_MEMORY * self.requests[rows] + both
        self.overall = GLOBAL_MEMORY ** len(rows) * self.overall + both.sum(axis=0)

    def of_all(self) -> float:
        expected, accepted = self.overall + PRIOR_TOKENS
        return float(accepted / expected)

    def ratio(self, rows: Ints) -> Floats:
        """Return the ratio of these requests, [D]."""
        prior = PRIOR_TOKENS * self.of_all()
        return (self.requests[rows, 1] + prior) / (self.requests[rows, 0] + PRIOR_TOKENS)
