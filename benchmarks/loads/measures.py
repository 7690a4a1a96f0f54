"""Measurements of an engine that steps by hand, besides those of `vllm_dflash.tools.loads`.

`swing` changes the number of requests in flight. `arrivals` are requests that come at moments of
their own. `decoding` measures decoding alone, after the prompts were read.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm_dflash.tools.loads import TO_THE_END, ClosedLoop, serve_answers, throughput
from vllm_dflash.tools.stepped_engine import Prompt, SteppedEngine


def measure_arrivals(
    engine: SteppedEngine,
    *,
    prompts: Sequence[str],
    answers: Sequence[int],
    arrivals: Sequence[float],
    wait: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Measure throughput and waiting times of N requests, however many are in flight.

    `arrivals`: arrival time of each request in seconds, ascending, [N]. `wait`: lets seconds pass
    while the engine is idle. The others: see `serve_answers`.
    """
    opened = engine.now()

    def arrival(number: int, in_flight: int) -> float | None:
        due = opened + arrivals[number]
        if in_flight and engine.now() < due:
            return None
        wait(max(due - engine.now(), 0.0))
        return due

    return serve_answers(engine, prompts, answers, arrival)


def measure_swing(
    engine: SteppedEngine, *, prompts: Sequence[str], phases: Sequence[tuple[int, int]], tokens: int
) -> dict[str, Any]:
    """Measure throughput in each phase: (requests in flight, tokens to generate)."""
    loop = ClosedLoop(engine, prompts, tokens, TO_THE_END)
    rates = []
    for concurrency, work in phases:
        began = engine.now()
        loop.resize(concurrency)
        emitted = 0
        while emitted < work:
            emitted += sum(len(output.token_ids) for output in loop.step())
        rates.append(emitted / (engine.now() - began))
    loop.resize(0)
    return {"concurrency": [count for count, _ in phases], "tokens_per_second": rates}


def measure_decoding(
    engine: SteppedEngine,
    *,
    prompts: Sequence[Prompt],
    concurrency: int,
    tokens: int,
    seconds: float,
    shorter: Sequence[int] = (0,),
    read: Callable[[], Mapping[str, float]] = dict,
) -> dict[str, Any]:
    """Measure throughput of batches of requests, one batch after the other.

    The measurement of a batch starts when each request has its first token and ends when they have
    `tokens` more on average. Its prompts are read once before that, so that with prefix caching all
    its requests start in the same step.

    Args:
        engine: an otherwise idle engine.
        prompts: prompts for one batch after the other, repeated as needed.
        concurrency: requests per batch.
        tokens: mean new tokens per request.
        seconds: total time to measure; the batch running at its end is finished.
        shorter: number of tokens to cut from the ends of prompts, one number per batch, repeated as
            needed. Different texts then follow from prompts that are in the prefix cache.
        read: returns sums counted elsewhere; their increase during measurements is `spent`.

    Raises:
        ValueError: a request finished before another one began, so the engine has no room for all.
    """
    queue = itertools.cycle(prompts)
    spent: dict[str, float] = {}
    emitted = outputs = 0
    elapsed = 0.0
    for number, cut in enumerate(itertools.cycle(shorter)):
        chosen = itertools.islice(queue, concurrency)
        batch = {f"{number}-{i}": prompt[: len(prompt) - cut] for i, prompt in enumerate(chosen)}
        _read_prompts(engine, batch)
        _start(engine, batch, tokens)
        before, opened = read(), engine.now()
        missing = concurrency * tokens
        finished: set[str] = set()
        while missing > 0 and not finished:
            for output in engine.step():
                missing -= len(output.token_ids)
                outputs += 1
                if output.finished:
                    finished.add(output.request_id)
        elapsed += engine.now() - opened
        after = read()
        emitted += concurrency * tokens - missing
        spent |= {name: spent.get(name, 0.0) + after[name] - before[name] for name in after}
        engine.abort(list(batch.keys() - finished))
        if elapsed >= seconds:
            break
    return throughput(emitted, elapsed, outputs) | {"spent": spent}


def _read_prompts(engine: SteppedEngine, batch: Mapping[str, Prompt]) -> None:
    for name, prompt in batch.items():
        engine.add(f"read {name}", prompt, 1, ignore_eos=True)
    reading = len(batch)
    while reading:
        reading -= sum(output.finished for output in engine.step())


def _start(engine: SteppedEngine, batch: Mapping[str, Prompt], tokens: int) -> None:
    """Add the requests of a batch, and run until each has a token."""
    for name, prompt in batch.items():
        # Twice the length, so that the first to start still run when the last one starts.
        engine.add(name, prompt, 2 * tokens, ignore_eos=True)
    silent = set(batch)
    while silent:
        outputs = engine.step()
        silent -= {output.request_id for output in outputs}
        if any(output.finished for output in outputs):
            raise ValueError(
                f"a request finished before the last of {len(batch)} started: the engine has no"
                " room for this many requests of this length. Give it more memory, or raise"
                " --tokens."
            )
