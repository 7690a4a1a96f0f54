"""Poisson: requests arrive at moments of their own, whether or not the engine keeps up."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

from vllm_dflash.tools.stepped_engine import SteppedEngine


def poisson_arrivals(rate: float, count: int, seed: str) -> list[float]:
    """Moments of a Poisson process of `rate` per second; the first is 0."""
    generator = random.Random(seed)
    gaps = (generator.expovariate(rate) for _ in range(count - 1))
    return list(itertools.accumulate(gaps, initial=0.0))


def measure_poisson(
    engine: SteppedEngine, *, prompts: Sequence[str], arrivals: Sequence[float], tokens: int
) -> dict[str, Any]:
    """Seconds from each request's arrival to its first and to its last token."""
    began = engine.now()
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    admitted = 0
    while len(last) < len(arrivals):
        now = engine.now() - began
        while admitted < len(arrivals) and arrivals[admitted] <= now:
            engine.add(str(admitted), prompts[admitted % len(prompts)], tokens, ignore_eos=True)
            admitted += 1
        if admitted == len(last):  # nothing in flight
            engine.sleep(arrivals[admitted] - now)
            continue
        outputs = engine.step()
        now = engine.now() - began
        for output in outputs:
            if output.token_ids:
                first.setdefault(output.request_id, now)
            if output.finished:
                last[output.request_id] = now
    return {
        "to_first_token": [first[str(i)] - arrival for i, arrival in enumerate(arrivals)],
        "to_last_token": [last[str(i)] - arrival for i, arrival in enumerate(arrivals)],
        "tokens": tokens,
        "makespan": max(last.values()),
    }
