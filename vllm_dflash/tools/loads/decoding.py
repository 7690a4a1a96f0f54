"""Decoding alone: requests that run together, all of them, after their prompts were read."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm_dflash.tools.stepped_engine import SteppedEngine

Prompt = str | Sequence[int]


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
    """Throughput of batches of requests, one batch after the other.

    A batch counts from when each of its requests has its first token until they have so many more
    on average. Its prompts are read once before that: where the engine keeps prefixes, all of its
    requests then start in the same step.

    Args:
        engine: nothing else runs on it.
        prompts: of one batch after the other, over and over.
        concurrency: requests of a batch.
        tokens: new ones of each request, on average.
        seconds: of all batches together; the last one is finished.
        shorter: tokens that prompts are cut by at their ends, batch by batch, over and over. So
            different texts follow from prompts that need not be read again.
        read: sums of what is counted elsewhere; what they grow by while a batch counts is `spent`.

    Raises:
        ValueError: a request was done before another one began: the engine has no room for all.
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
    return {
        "tokens": emitted,
        "seconds": elapsed,
        "tokens_per_second": emitted / elapsed,
        "tokens_per_output": emitted / max(1, outputs),
        "spent": spent,
    }


def _read_prompts(engine: SteppedEngine, batch: Mapping[str, Prompt]) -> None:
    for name, prompt in batch.items():
        engine.add(f"read {name}", prompt, 1, ignore_eos=True)
    reading = len(batch)
    while reading:
        reading -= sum(output.finished for output in engine.step())


def _start(engine: SteppedEngine, batch: Mapping[str, Prompt], tokens: int) -> None:
    """Until each request has a token."""
    for name, prompt in batch.items():
        # Those that are ahead of the others must go on, or not all would run together.
        engine.add(name, prompt, 2 * tokens, ignore_eos=True)
    silent = set(batch)
    while silent:
        outputs = engine.step()
        silent -= {output.request_id for output in outputs}
        if any(output.finished for output in outputs):
            raise ValueError(
                f"a request came to its end before the last of {len(batch)} had begun: the engine"
                " has no room for so many of this length. Give it more memory, or raise --tokens."
            )
