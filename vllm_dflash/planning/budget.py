"""How many drafts of a step are worth verifying, all requests together: the device splits them.

Chances of the drafts that a step is to verify are on the device, and the host does not wait for
them; it has those of the steps before. Of many requests, one of these is sample enough. Of a few
it is not: a budget by the last block of a single request follows its luck (vllm#52362: 20% below a
fixed length). So the fewer requests there are, the more of their steps are taken together.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_dflash.planning import Floats, Ints
from vllm_dflash.planning.costs import StepCosts

MOST_STEPS = 16
"""Most steps whose chances are remembered."""
ENOUGH_REQUESTS = 48
"""Requests of a sample: one step of so many is enough, of fewer as many steps as make them."""
ASSUMED_RATE = 0.8
"""Chance of a draft of a request of which nothing is known."""
CANDIDATES = 48
"""Budgets that are compared, beyond which only every so many-th one is."""


class RecentChances:
    """Survival of the drafts of each request slot in its last few steps."""

    def __init__(self, max_requests: int, max_draft: int) -> None:
        """For up to `max_draft` drafts (K) of each slot."""
        self._assumed = ASSUMED_RATE ** np.arange(1, max_draft + 1)
        self._survival = np.zeros((MOST_STEPS, max_requests, max_draft), np.float32)
        self._survival[:] = self._assumed
        self._next = np.zeros(max_requests, np.int64)

    def forget(self, slot: int) -> None:
        """It is another request's from now on."""
        self._survival[:, slot] = self._assumed

    def add(self, slots: Ints, chances: Floats) -> None:
        """Those of R requests, of each draft given those before it, [R, K]."""
        self._survival[self._next[slots], slots] = np.cumprod(chances, axis=1)
        self._next[slots] = (self._next[slots] + 1) % MOST_STEPS

    def sample(self, slots: Ints, num_drafts: Ints) -> tuple[Floats, int]:
        """Survival of drafts like those of a step of R requests.

        Args:
            slots: of the requests, [R].
            num_drafts: of each that may be verified, [R].

        Returns:
            Survival, the best ones first, [N], and how many steps they stand for.
        """
        steps = min(-(-ENOUGH_REQUESTS // len(slots)), MOST_STEPS)
        back = (self._next[slots] - 1 - np.arange(steps)[:, None]) % MOST_STEPS  # [steps, R]
        found = self._survival[back, slots]  # [steps, R, K]
        within = np.arange(found.shape[2]) < num_drafts[:, None]  # [R, K]
        return -np.sort(-found[:, within].ravel()), steps


class Load(NamedTuple):
    """A step that may verify drafts."""

    num_requests: int
    """That decode, R."""
    rows: int
    """Rows of the target without drafts: R, and those of prompts."""
    context: float
    """Tokens of context of all requests."""
    mean_context: float
    """Mean context of requests that have drafts."""
    block_rows: int
    """Rows of the block that is drafted next; 0: none."""


def best_budget(
    costs: StepCosts, load: Load, scores: Floats, steps: int, most: int, min_verified: int = 0
) -> int:
    """Drafts to verify in a step: those that bring more than the time they take is worth.

    What time is worth is the best rate of a step that only decodes, so that drafts beside a long
    prompt are not held for free because the step takes long anyway.

    Args:
        costs: of steps.
        load: what the step does without drafts.
        scores: survival of drafts like these, the best ones first, [N].
        steps: how many steps those are of.
        most: drafts there are.
        min_verified: drafts to verify whatever they seem worth.
    """
    tries = np.arange(most + 1)
    if most > CANDIDATES:
        tries = np.unique(np.r_[tries[:16], np.linspace(16, most, CANDIDATES - 16).astype(int)])
    summed = np.concatenate([[0.0], np.cumsum(scores, dtype=np.float64)]) / steps
    gain = np.interp(tries * steps, np.arange(len(summed)), summed)
    count, reading = load.num_requests, load.mean_context * tries
    seconds = costs.decoding(count, count + tries, load.context, reading)
    rate = float(((count + gain) / (seconds + costs.block(load.block_rows, load.context))).max())
    if load.rows > count:
        seconds = costs.verify.at(load.rows + tries) + costs.attention.draft * reading
    # A long step is not worth more drafts than a short one, only those that pay for themselves.
    value = gain - rate * (seconds - seconds[0])
    best = int(tries[int(value.argmax())])
    return min(max(best, min_verified), most)
