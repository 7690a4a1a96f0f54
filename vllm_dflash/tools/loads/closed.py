"""Closed loops: exactly so many clients, each of which asks again as soon as it is served."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from vllm_dflash.tools.stepped_engine import Output, SteppedEngine


class ClosedLoop:
    """Keeps a number of requests in flight; a finished one is replaced by the next prompt."""

    def __init__(self, engine: SteppedEngine, prompts: Sequence[str], tokens: int) -> None:
        self._engine = engine
        self._prompts = itertools.cycle(prompts)
        self._tokens = tokens
        self._ids = map(str, itertools.count())
        self.in_flight: list[str] = []
        """Ids of requests, oldest first."""

    def resize(self, concurrency: int) -> None:
        """Go on with this many requests: the oldest of a surplus hang up, new ones are admitted."""
        missing = concurrency - len(self.in_flight)
        if missing < 0:
            self._engine.abort(self.in_flight[:-missing])
            del self.in_flight[:-missing]
        for number in range(1, missing + 1):
            # Lengths in steps up to the full one, so that they finish evenly spread in time, as
            # in a loop that has been running for long.
            self._admit(-(-self._tokens * number // missing))

    def step(self) -> list[Output]:
        """One step of the engine; finished requests are replaced."""
        outputs = self._engine.step()
        for output in outputs:
            if output.finished:
                self.in_flight.remove(output.request_id)
                self._admit(self._tokens)
        return outputs

    def _admit(self, max_tokens: int) -> None:
        self.in_flight.append(next(self._ids))
        self._engine.add(self.in_flight[-1], next(self._prompts), max_tokens, ignore_eos=True)


def measure_closed(
    engine: SteppedEngine, *, prompts: Sequence[str], concurrency: int, tokens: int, seconds: float
) -> dict[str, Any]:
    """Throughput in a window that opens when each of the first requests has its first token."""
    loop = ClosedLoop(engine, prompts, tokens)
    loop.resize(concurrency)
    silent = set(loop.in_flight)
    while silent:
        silent -= {output.request_id for output in loop.step()}
    # The window opens and closes at the end of a step, so it holds whole steps.
    opened = engine.now()
    outputs: list[Output] = []
    while (elapsed := engine.now() - opened) < seconds:
        outputs += loop.step()
    loop.resize(0)
    emitted = sum(len(output.token_ids) for output in outputs)
    return {
        "tokens": emitted,
        "seconds": elapsed,
        "tokens_per_second": emitted / elapsed,
        "tokens_per_output": emitted / max(1, len(outputs)),
    }


def measure_swing(
    engine: SteppedEngine, *, prompts: Sequence[str], phases: Sequence[tuple[int, int]], tokens: int
) -> dict[str, Any]:
    """Throughput in each phase: a number of requests, and the tokens to write until the next."""
    loop = ClosedLoop(engine, prompts, tokens)
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
