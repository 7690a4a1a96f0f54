"""Timing for the profile at start-up: what each part of a step costs, by number of rows.

Each runner has its own dummy batches (`v1/v1_profile.py`, `v2/v2_profile.py`), the same on every
rank; the profile takes a few seconds.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from vllm_dflash.engine.agreement import from_rank_0
from vllm_dflash.planning.costs import NO_ATTENTION, Attention, Curve

SECONDS_PER_CURVE = 1.0
"""Time budget of a curve. Past the last measured row count, its last slope continues."""
ROW_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
CONTEXT_TOKENS = 128
"""Context length of the dummy requests."""
FAR_CONTEXT_TOKENS = 8192
"""Context length of the long dummy requests; the difference in time is the cost of attention."""


def least_seconds(run: Callable[[], object], before: Callable[[], object]) -> float:
    """Seconds of the fastest of three runs, each after a call of `before`, which is not timed.

    All ranks get rank 0's time, so that they plan from the same costs.
    """
    times = []
    for _ in range(3):
        before()
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return from_rank_0(min(times))


def measure_curve(
    run: Callable[[int], object],
    rows: Iterable[int],
    share: float = 1.0,
    before: Callable[[], object] = lambda: None,
) -> Curve:
    """Time `run(count)` for each of `rows`, ascending; stops after a `share` of
    `SECONDS_PER_CURVE`, but not before two row counts."""
    counts: list[int] = []
    seconds: list[float] = []
    spent = 0.0
    for count in rows:
        run(count)  # the first run with a new number of rows may build kernels
        began = time.perf_counter()
        seconds.append(least_seconds(functools.partial(run, count), before))
        counts.append(count)
        spent += from_rank_0(time.perf_counter() - began)
        if spent > share * SECONDS_PER_CURVE and len(counts) >= 2:
            break
    return Curve(np.array(counts), np.array(seconds))


def profiled_rows(max_requests: int, most: int, of_each: Iterable[int] = ROW_COUNTS) -> list[int]:
    """Numbers of rows to profile, up to `most`: requests of one row each, then full batches in
    which each request has as many rows as one of `of_each`.

    vLLM's dummy batches give all leftover rows to one request, which could then be longer than its
    cache. So a batch is either not full or evenly filled.
    """
    rows = {count for count in ROW_COUNTS if count <= max_requests}
    rows |= {max_requests * each for each in of_each}
    return sorted(count for count in rows if count <= most)


def measure_attention(
    verify: Callable[[int, int], object],
    block: Callable[[int, int], object],
    block_rows: int,
    longest: int,
    num_requests: Callable[[], int] = lambda: 1,
) -> Attention:
    """Measure what each token of context adds to a step; `NO_ATTENTION` if contexts are short.

    Args:
        verify: runs the target with so many rows of a request, and so much context.
        block: the same for drafting a block.
        block_rows: rows of a block.
        longest: maximum tokens of context of a block.
        num_requests: requests of the last run, each with that context and a block.
    """
    near, far = CONTEXT_TOKENS, min(FAR_CONTEXT_TOKENS, longest)
    if far <= 2 * near:
        return NO_ATTENTION

    def per_token(run: Callable[[int, int], object], rows: int) -> float:
        curve = measure_curve(lambda context: run(rows, context), (near, far))
        return float(curve.seconds[1] - curve.seconds[0]) / (far - near)

    plain = per_token(verify, 1) / num_requests()
    drafted, count = per_token(verify, block_rows), num_requests()
    # If each request had only one row, the cost of more is unknown. Real steps will show it.
    more = max(drafted - count * plain, 0.0) / (block_rows - count) if count < block_rows else 0.0
    return Attention(plain, more, per_token(block, block_rows) / count)


@contextmanager
def target_alone(drafter: Any) -> Iterator[None]:
    """Context in which dummy runs leave out the drafter. If one fails, no engine starts."""
    drafter.runs_target_alone = True
    yield
    drafter.runs_target_alone = False
