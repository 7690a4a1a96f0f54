"""Exploration: when to try what the plan rejects, and with which requests.

What is not done is not measured: a planner that does not draft cannot see that drafting pays again,
and one that drafts in every step cannot see what plain decoding takes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_dflash.planning import Ints
from vllm_dflash.planning.search import Batch
from vllm_dflash.planning.step import Plan

PROBE_SHARE = 16
"""A probe tries one request, and one more per this many in the batch."""
PROBE_LENGTH = 3
"""Drafts that a probe verifies, however little they seem worth, to test the estimates."""
FIRST_SHARE, LEAST_SHARE = 0.015, 0.002
"""Share of the time that probes may take: of the first one, and in the long run."""


@dataclass
class Probes:
    """When to go against the plan. Probes take at most a share of the time, which halves with each
    one, so that the intervals between them grow."""

    least_share: float = LEAST_SHARE
    share: float = FIRST_SHARE
    saved: float = 0.0
    """Seconds that may be spent on a probe by now."""

    def are_due(
        self, passed: float, lost: float, *, is_new: bool = False, promise: float = 1.0
    ) -> bool:
        """Return whether to probe now.

        Args:
            passed: seconds since this was last asked.
            lost: seconds that the probe takes.
            is_new: there is something to measure that never was.
            promise: the most that can be won by it, relative to the step's rate. Less than that
                share of the time is taken, but for the long run's.
        """
        share = (FIRST_SHARE if is_new else self.share) * min(promise, 1.0)
        self.saved += passed * max(share, self.least_share)
        if self.saved < lost:
            return False
        self.saved, self.share = 0.0, max(self.share / 2, self.least_share)
        return True

    def restart(self) -> None:
        """Reset to short intervals: what was measured has changed."""
        self.share, self.saved = FIRST_SHARE, 0.0


def to_probe(batch: Batch, best: Plan, last_step: Ints) -> Ints:
    """Return which of R requests to probe: those of whose blocks the plan verifies nothing, and of
    these the ones whose blocks were never verified, or longest ago.

    `last_step`: when each one's last were, [R].
    """
    idle = np.flatnonzero((batch.max_drafts > 0) & ~(best.drafted & (best.lengths > 0)))
    longest_ago = np.argsort(last_step[idle], kind="stable")
    return idle[longest_ago[: 1 + batch.size // PROBE_SHARE]]
