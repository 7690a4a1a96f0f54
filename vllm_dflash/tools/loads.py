"""Loads: the requests that clients send to an engine, and measurements of how it serves them.

Loads step the engine by hand, so the number of requests in flight is exact. A closed loop has a
fixed number of clients, each of which sends its next request as soon as one is served. `answers`
is a list of requests that every engine serves to the end.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from vllm_dflash.tools.stepped_engine import Output, Prompt, SteppedEngine

TO_THE_END: Mapping[str, Any] = MappingProxyType({"ignore_eos": True})
"""Arguments of `SteppedEngine.add` for answers of full length."""


class ClosedLoop:
    """Keeps a fixed number of requests in flight: the next prompt replaces a finished request."""

    def __init__(
        self,
        engine: SteppedEngine,
        prompts: Sequence[str],
        tokens: int,
        sampling: Mapping[str, Any],
    ) -> None:
        self._engine = engine
        self._prompts = itertools.cycle(prompts)
        self._tokens = tokens
        self._sampling = sampling
        self._ids = map(str, itertools.count())
        self.in_flight: list[str] = []
        """Ids of requests, oldest first."""

    def resize(self, concurrency: int) -> None:
        """Change the number of requests in flight: abort the oldest surplus ones, or add new."""
        missing = concurrency - len(self.in_flight)
        if missing < 0:
            self._engine.abort(self.in_flight[:-missing])
            del self.in_flight[:-missing]
        for number in range(1, missing + 1):
            # Stagger the lengths up to the full one, so that requests finish evenly spread in
            # time, as in a loop that has been running for long.
            self._admit(-(-self._tokens * number // missing))

    def step(self) -> list[Output]:
        """Run one step of the engine and replace finished requests."""
        outputs = self._engine.step()
        for output in outputs:
            if output.finished:
                self.in_flight.remove(output.request_id)
                self._admit(self._tokens)
        return outputs

    def _admit(self, max_tokens: int) -> None:
        self.in_flight.append(next(self._ids))
        self._engine.add(self.in_flight[-1], next(self._prompts), max_tokens, **self._sampling)


def measure_closed(
    engine: SteppedEngine,
    *,
    prompts: Sequence[str],
    concurrency: int,
    tokens: int,
    seconds: float,
    sampling: Mapping[str, Any] = TO_THE_END,
) -> dict[str, Any]:
    """Measure throughput in a window that opens once every initial request has its first token."""
    loop = ClosedLoop(engine, prompts, tokens, sampling)
    loop.resize(concurrency)
    silent = set(loop.in_flight)
    while silent:
        silent -= {output.request_id for output in loop.step()}
    # The window opens and closes at the end of a step, so that it contains whole steps.
    opened = engine.now()
    outputs: list[Output] = []
    while (elapsed := engine.now() - opened) < seconds:
        outputs += loop.step()
    loop.resize(0)
    return throughput(sum(len(one.token_ids) for one in outputs), elapsed, len(outputs))


def measure_answers(
    engine: SteppedEngine,
    *,
    prompts: Sequence[Prompt],
    answers: Sequence[int],
    concurrency: int,
    categories: Sequence[str] = (),
    sampling: Mapping[str, Any] = TO_THE_END,
) -> dict[str, Any]:
    """Measure throughput and waiting times of a list of N requests.

    Throughput is from the call to the end of the last request. The waiting times are those until
    each request's first token, and per token after it (the request's mean). A request waits from
    the moment it is sent.

    Args:
        engine: an otherwise idle engine.
        prompts: prompts of the requests, repeated as needed.
        answers: maximum new tokens of each request, [N].
        concurrency: most requests in flight.
        categories: category of each request, [N]. If given, the result has a list `requests`: for
            each request, every output's seconds since it was sent and number of tokens.
        sampling: see `SteppedEngine.add`.
    """
    opened, count = engine.now(), len(answers)
    texts = itertools.cycle(prompts)
    sent: dict[str, float] = {}
    outputs: dict[str, list[tuple[float, int]]] = {}
    ended = 0
    while ended < count:
        while (number := len(sent)) < min(count, ended + concurrency):
            name = str(number)
            sent[name], outputs[name] = engine.now(), []
            engine.add(name, next(texts), answers[number], **sampling)
        for output in engine.step():
            outputs[output.request_id].append((engine.now(), len(output.token_ids)))
            ended += output.finished
    elapsed = engine.now() - opened
    waits = [[then - sent[name] for then, _ in seen] for name, seen in outputs.items()]
    tokens = [[more for _, more in seen] for seen in outputs.values()]
    written = [*map(sum, tokens)]
    result = throughput(sum(written), elapsed, sum(map(len, tokens))) | {
        "first_token_seconds": [waited[0] for waited in waits],
        "token_seconds": token_seconds(waits, written),
    }
    if categories:
        records = zip(categories, waits, tokens, strict=True)
        names = ("category", "seconds", "tokens")
        result["requests"] = [dict(zip(names, one, strict=True)) for one in records]
    return result


def token_seconds(waits: Sequence[Sequence[float]], written: Sequence[int]) -> list[float]:
    """Return the mean time per token after the first, for each request with more than one token.

    `waits` are each request's times until its outputs, `written` its number of tokens.
    """
    return [
        (waited[-1] - waited[0]) / (count - 1)
        for waited, count in zip(waits, written, strict=True)
        if count > 1
    ]


def throughput(tokens: int, seconds: float, outputs: int) -> dict[str, Any]:
    """Summarize a measurement. `outputs`: how often a step produced tokens for a request."""
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "tokens_per_output": tokens / max(1, outputs),
    }
