"""The best of steps that verify all drafts above a threshold of worth.

A draft's worth is known only once it is made. So before that, drafts are counted by thresholds:
those that texts predict by what is expected of each, those of blocks by what recent blocks had
(`forecast.py`). Counts of requests add up, and whichever threshold has the best rate tells what a
step will verify, and how fast it will be.
"""

from __future__ import annotations

import numpy as np

from vllm_dflash.planning import Floats, Ints, Records
from vllm_dflash.planning.compiled import compiled
from vllm_dflash.planning.costs import decoding_seconds
from vllm_dflash.planning.objective import fastest

THRESHOLDS = np.array([0.0, 0.03, 0.07, 0.12, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
"""Worth from which a draft may be kept; which threshold is best depends on the step."""


@compiled
def above_thresholds(curves: Floats, limits: Ints, min_worth: Floats) -> Floats:
    """Return how many drafts of R requests are worth each threshold, and what those are worth
    together, [2, R, T].

    Args:
        curves: worth of the drafts, falling, [R, K].
        limits: drafts that each request can use, [R].
        min_worth: worth that its drafts must exceed, [R].
    """
    found = np.zeros((2, len(curves), len(THRESHOLDS)))
    for request in range(len(curves)):
        for threshold in range(len(THRESHOLDS)):
            for worth in curves[request, : limits[request]]:
                if worth < THRESHOLDS[threshold] or worth <= min_worth[request]:
                    break
                found[0, request, threshold] += 1.0
                found[1, request, threshold] += worth
    return found


@compiled
def summed(found: Floats, members: Ints, context_lens: Ints) -> Floats:
    """Add up what some requests yield by threshold: drafts, their worth, and tokens of context
    before each draft, [3, T]; `found`: see `above_thresholds`, [2, R, T]."""
    sums = np.zeros((3, found.shape[2]))
    for request in members:
        for threshold in range(found.shape[2]):
            drafts = found[0, request, threshold]
            sums[0, threshold] += drafts
            sums[1, threshold] += found[1, request, threshold]
            sums[2, threshold] += drafts * context_lens[request]
    return sums


@compiled
def best_threshold(
    records: Records,
    num_requests: int,
    context: float,
    drafts: Floats,
    block_seconds: float,
    fair: bool,
) -> tuple[int, float, float]:
    """Return which of T steps has the best rate, that rate, and the step's seconds.

    Args:
        records: costs, [1].
        num_requests: requests that decode, R.
        context: tokens of context of all of them.
        drafts: drafts that each step verifies, their worth, and tokens of context before each
            draft, [3, T].
        block_seconds: time of the block that the step drafts.
        fair: the objective; see `objective`.
    """
    rows = num_requests + drafts[0]
    seconds = decoding_seconds(records, num_requests, context, rows, drafts[2]) + block_seconds
    best, rate = fastest(num_requests, drafts[1], seconds, fair)
    return best, rate, seconds[best]
