"""Loads: what clients ask of an engine, and how it serves them. They step it by hand.

So what is in flight is exact. Closed loops have so many clients, each of which asks again as soon
as it is served. Answers are a list of requests that all engines serve to its end. Decoding is
measured alone, after prompts were read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from vllm_dflash.tools.stepped_engine import Output, Prompt, SteppedEngine

TO_THE_END: Mapping[str, Any] = MappingProxyType({"ignore_eos": True})
"""Arguments of `SteppedEngine.add`, for answers as long as they may be."""


class ClosedLoop:
    """Keeps a number of requests in flight; a finished one is replaced by the next prompt."""

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
    """Throughput in a window that opens when each of the first requests has its first token."""
    loop = ClosedLoop(engine, prompts, tokens, sampling)
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
    """Throughput of a list of requests, from the first one to the end of the last one, and how
    long each waited for its first token, and for every one behind that, on average.

    Args:
        engine: nothing else runs on it.
        prompts: of the requests, over and over.
        answers: tokens of each at most, [N].
        concurrency: requests in flight at most; None: any number.
        arrivals: seconds at which each comes, ascending, [N]; without them, as soon as it may.
        read: see `measure_decoding`.
        categories: of each, [N]: then there is a record of each, `requests`, with the seconds since
            it came, and the tokens, of every output.
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
    """Throughput in each phase: a number of requests, and the tokens to write until the next."""
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
    return _throughput(emitted, elapsed, outputs) | {"spent": spent}


def token_seconds(waits: Sequence[Sequence[float]], written: Sequence[int]) -> list[float]:
    """For each token behind the first one, on average, of each request that has some: `waits` are
    until each of its outputs, `written` its tokens."""
    return [
        (waited[-1] - waited[0]) / (count - 1)
        for waited, count in zip(waits, written, strict=True)
        if count > 1
    ]


def _throughput(tokens: int, seconds: float, outputs: int) -> dict[str, Any]:
    """`outputs` is how often a step gave tokens to a request."""
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
