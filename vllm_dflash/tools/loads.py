"""Loads: the requests that clients send to an engine, and measurements of how it serves them.

Loads step the engine by hand, so the number of requests in flight is exact. A closed loop has a
fixed number of clients, each of which sends its next request as soon as one is served. `answers`
is a list of requests that every engine serves to the end. `decoding` measures decoding alone, after
the prompts were read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
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
    return _throughput(sum(len(one.token_ids) for one in outputs), elapsed, len(outputs))


def measure_answers(
    engine: SteppedEngine,
    *,
    prompts: Sequence[str],
    answers: Sequence[int],
    concurrency: int | None = None,
    arrivals: Sequence[float] = (),
    read: Callable[[], Mapping[str, float]] = dict,
    categories: Sequence[str] = (),
    sampling: Mapping[str, Any] = TO_THE_END,
) -> dict[str, Any]:
    """Measure throughput and waiting times of a list of N requests.

    Throughput is from the call to the end of the last request. The waiting times are those until
    each request's first token, and per token after it (the request's mean).

    Args:
        engine: an otherwise idle engine.
        prompts: prompts of the requests, repeated as needed.
        answers: maximum new tokens of each request, [N].
        concurrency: maximum requests in flight; None: unlimited.
        arrivals: arrival time of each request in seconds, ascending, [N]; empty: each arrives as
            soon as `concurrency` allows.
        read: see `measure_decoding`.
        categories: category of each request, [N]. If given, the result has a list `requests`: for
            each request, every output's seconds since the arrival and number of tokens.
        sampling: see `SteppedEngine.add`.
    """
    before, opened, count = read(), engine.now(), len(answers)
    due = [opened + seconds for seconds in arrivals or [0.0] * count]
    texts = itertools.cycle(prompts)
    came: dict[str, float] = {}
    outputs: dict[str, list[tuple[float, int]]] = {}
    ended = 0
    while ended < count:
        if len(came) == ended:
            engine.wait_until(due[len(came)])
        while len(came) < count and due[len(came)] <= engine.now():
            if concurrency is not None and len(came) - ended >= concurrency:
                break
            number, name = len(came), str(len(came))
            came[name] = due[number] if arrivals else engine.now()
            engine.add(name, next(texts), answers[number], **sampling)
            outputs[name] = []
        for output in engine.step():
            outputs[output.request_id].append((engine.now(), len(output.token_ids)))
            ended += output.finished
    elapsed, after = engine.now() - opened, read()
    waits = [[then - came[name] for then, _ in seen] for name, seen in outputs.items()]
    tokens = [[more for _, more in seen] for seen in outputs.values()]
    written = [*map(sum, tokens)]
    result = _throughput(sum(written), elapsed, sum(map(len, tokens))) | {
        "first_token_seconds": [waited[0] for waited in waits],
        "token_seconds": token_seconds(waits, written),
        "spent": {name: after[name] - before[name] for name in after},
    }
    if categories:
        records = zip(categories, waits, tokens, strict=True)
        names = ("category", "seconds", "tokens")
        result["requests"] = [dict(zip(names, one, strict=True)) for one in records]
    return result


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
    return _throughput(emitted, elapsed, outputs) | {"spent": spent}


def token_seconds(waits: Sequence[Sequence[float]], written: Sequence[int]) -> list[float]:
    """Return the mean time per token after the first, for each request with more than one token.

    `waits` are each request's times until its outputs, `written` its number of tokens.
    """
    return [
        (waited[-1] - waited[0]) / (count - 1)
        for waited, count in zip(waits, written, strict=True)
        if count > 1
    ]


def _throughput(tokens: int, seconds: float, outputs: int) -> dict[str, Any]:
    """Summarize a measurement. `outputs`: how often a step produced tokens for a request."""
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "tokens_per_output": tokens / max(1, outputs),
    }


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
