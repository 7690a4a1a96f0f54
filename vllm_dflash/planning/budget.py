"""How many drafts to verify in a step, over all requests; the device divides them.

The chances of the drafts to verify are on the device, and the host does not wait for them: it uses
those of earlier steps. With many requests, one such step is a large enough sample. With few it is
not: a budget from the last block of a single request follows its luck (vllm#52362: 20% below a
fixed length). So the fewer requests there are, the more of their steps are pooled.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_dflash.planning import Floats, Ints
from vllm_dflash.planning.costs import StepCosts
from vllm_dflash.planning.objective import fastest, price_of, worth_of, worthiest

MOST_SAMPLED = 16
"""Number of steps whose chances are remembered."""
ENOUGH_REQUESTS = 48
"""Requests that a sample needs: one step with this many, or several steps with fewer."""
ASSUMED_RATE = 0.8
"""Assumed chance of each draft of a request about which nothing is known."""
CANDIDATES = 48
"""Budgets to compare; a larger range is thinned out."""


class RecentWorths:
    """Worth of the drafts of each request slot in its last few steps."""

    def __init__(self, max_requests: int, max_draft: int, *, fair: bool = False) -> None:
        """Keep up to `max_draft` drafts (K) of each slot; `fair`: the objective."""
        self._fair = fair
        self._assumed = worth_of(ASSUMED_RATE ** np.arange(1, max_draft + 1), fair)
        self._worth = np.zeros((MOST_SAMPLED, max_requests, max_draft), np.float32)
        self._worth[:] = self._assumed
        self._next = np.zeros(max_requests, np.int64)

    def forget(self, slot: int) -> None:
        """Reset a slot that now belongs to another request."""
        self._worth[:, slot] = self._assumed

    def add(self, slots: Ints, chances: Floats) -> None:
        """Add the chance of each draft given those before it, of R requests, [R, K]."""
        self._worth[self._next[slots], slots] = worth_of(np.cumprod(chances, axis=1), self._fair)
        self._next[slots] = (self._next[slots] + 1) % MOST_SAMPLED

    def sample(self, slots: Ints, num_drafts: Ints) -> tuple[Floats, int]:
        """Return the worth of drafts like those of a step of R requests.

        Args:
            slots: slots of the requests, [R].
            num_drafts: drafts of each request that may be verified, [R].

        Returns:
            Worth in descending order, [N], and the number of steps it covers.
        """
        steps = min(-(-ENOUGH_REQUESTS // len(slots)), MOST_SAMPLED)
        back = (self._next[slots] - 1 - np.arange(steps)[:, None]) % MOST_SAMPLED  # [steps, R]
        found = self._worth[back, slots]  # [steps, R, K]
        within = np.arange(found.shape[2]) < num_drafts[:, None]  # [R, K]
        return -np.sort(-found[:, within].ravel()), steps


class Load(NamedTuple):
    """A step that may verify drafts."""

    num_requests: int
    """Requests that decode, R."""
    rows: int
    """Rows of the target without drafts: R, plus those of prompts."""
    context: float
    """Tokens of context of all requests."""
    mean_context: float
    """Mean context of requests that have drafts."""
    block_rows: int = 0
    """Rows of the block that is drafted next; 0: none."""
    block_context: float = 0.0
    """Tokens of context that it attends to."""


def best_budget(
    costs: StepCosts,
    load: Load,
    scores: Floats,
    steps: int,
    most: int,
    min_verified: int = 0,
    *,
    fair: bool = False,
) -> int:
    """Return how many drafts to verify in a step: those that yield more than their time is worth.

    Time is worth the best rate of a step that only decodes. Otherwise drafts beside a long prompt
    would seem free, because the step takes long anyway.

    Args:
        costs: costs of steps.
        load: what the step does without drafts.
        scores: worth of similar drafts, in descending order, [N].
        steps: number of steps that `scores` covers.
        most: number of drafts there are.
        min_verified: drafts to verify, however little they seem worth.
        fair: the objective; see `objective`.
    """
    tries = np.arange(most + 1)
    if most > CANDIDATES:
        tries = np.unique(np.r_[tries[:16], np.linspace(16, most, CANDIDATES - 16).astype(int)])
    summed = np.concatenate([[0.0], np.cumsum(scores, dtype=np.float64)]) / steps
    gain = np.interp(tries * steps, np.arange(len(summed)), summed)
    count, reading = load.num_requests, load.mean_context * tries
    seconds = costs.decoding(count, count + tries, load.context, reading)
    whole = seconds + costs.block(load.block_rows, load.block_context)
    step, rate = fastest(count, gain, whole, fair)
    price = price_of(count, rate, float(whole[step]), fair)
    if load.rows > count:
        seconds = costs.verify.at(load.rows + tries) + costs.attention.draft * reading
    # A long step is not worth more drafts than a short one, only those that pay for themselves.
    best = int(tries[worthiest(gain, seconds - seconds[0], price)])
    return min(max(best, min_verified), most)
