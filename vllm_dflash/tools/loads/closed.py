"""Closed loop: exactly so many clients, each of which asks again as soon as it is served."""

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
        self._ids = itertools.count()
        self._in_flight: dict[str, None] = {}  # a set in order of admission

    @property
    def in_flight(self) -> list[str]:
        """Ids of the requests in flight, oldest first."""
        return list(self._in_flight)

    def resize(self, concurrency: int) -> None:
        """Go on with this many requests: the oldest of a surplus hang up, new ones are admitted."""
        surplus = self.in_flight[: max(0, len(self._in_flight) - concurrency)]
        if surplus:
            self._engine.abort(surplus)
        for request_id in surplus:
            del self._in_flight[request_id]
        missing = concurrency - len(self._in_flight)
        for number in range(1, missing + 1):
            # Lengths in steps up to the full one, so that they finish evenly spread in time, as
            # in a loop that has been running for long.
            self._admit(-(-self._tokens * number // missing))

    def step(self) -> list[Output]:
        """One step of the engine; finished requests are replaced."""
        outputs = self._engine.step()
        for output in outputs:
            if output.finished:
                del self._in_flight[output.request_id]
                self._admit(self._tokens)
        return outputs

    def close(self) -> None:
        """All clients hang up."""
        self.resize(0)

    def _admit(self, max_tokens: int) -> None:
        request_id = str(next(self._ids))
        self._in_flight[request_id] = None
        self._engine.add(request_id, next(self._prompts), max_tokens, ignore_eos=True)


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
    loop.close()
    emitted = sum(len(output.token_ids) for output in outputs)
    return {
        "tokens": emitted,
        "seconds": elapsed,
        "tokens_per_second": emitted / elapsed,
        "tokens_per_output": emitted / max(1, len(outputs)),
    }
