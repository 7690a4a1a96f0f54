"""Many clients at once, and the count of how their requests ended."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import httpx

from soak.behaviours import (
    BEHAVIOURS,
    COMPLETIONS,
    MODEL,
    Behaviour,
    Client,
    Outcome,
)

PATIENCE_S = 120
"""A request that takes longer is a fault."""


@dataclass
class Tally:
    """Outcomes of all requests so far."""

    outcomes: dict[str, Counter[str]] = field(
        default_factory=lambda: {behaviour.name: Counter() for behaviour in BEHAVIOURS}
    )
    """Behaviour -> status -> count."""
    faults: list[str] = field(default_factory=list)
    gap_times: list[float] = field(default_factory=list)
    """`time.monotonic` at the end of each stream, and the mean seconds between its chunks."""
    gaps: list[float] = field(default_factory=list)

    def add(self, behaviour: Behaviour, outcome: Outcome) -> None:
        """Count one request."""
        self.outcomes[behaviour.name][str(outcome.status)] += 1
        if outcome.status not in behaviour.statuses:
            self.faults.append(f"{behaviour.name}: {outcome.status} {outcome.detail}")
        if outcome.gaps:
            self.gap_times.append(time.monotonic())
            self.gaps.append(sum(outcome.gaps) / len(outcome.gaps))

    def fail(self, behaviour: Behaviour, error: Exception) -> None:
        """Count a request that got no answer."""
        self.outcomes[behaviour.name][type(error).__name__] += 1
        why = type(error.__cause__).__name__ if error.__cause__ else ""
        self.faults.append(f"{behaviour.name}: {type(error).__name__} {error} {why}".strip())

    @property
    def total(self) -> int:
        """Requests so far."""
        return sum(sum(statuses.values()) for statuses in self.outcomes.values())


def connected(url: str) -> httpx.AsyncClient:
    """Return an HTTP client with any number of connections.

    It drops idle connections long before the server does (`soak_run` tells the server when): a
    request that is sent while the server closes its connection is lost.
    """
    limits = httpx.Limits(max_connections=None, keepalive_expiry=1.0)
    return httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits)


async def serve_one(client: Client, tally: Tally, until: float, first: list[Behaviour]) -> None:
    """Send requests until `until` (`time.monotonic`), starting with the behaviours in `first`."""
    weights = [behaviour.weight for behaviour in BEHAVIOURS]
    while time.monotonic() < until:
        if first:
            behaviour = first.pop()
        else:
            (behaviour,) = client.chance.choices(BEHAVIOURS, weights)
        try:
            tally.add(behaviour, await behaviour.behave(client))
        except (httpx.HTTPError, ValueError, KeyError) as error:
            tally.fail(behaviour, error)
            await asyncio.sleep(0.5)  # do not flood a dead server


async def run_clients(
    url: str, count: int, prompts: list[str], max_model_len: int, until: float, tally: Tally
) -> None:
    """Run `count` clients at once. Each behaviour is taken once before clients choose at random.

    Each has connections of its own, as real clients have, so that disconnects affect no other.
    """
    waiting = list(BEHAVIOURS)
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        for number in range(count):
            http = await stack.enter_async_context(connected(url))
            client = Client(http, prompts, max_model_len, random.Random(number))
            group.create_task(serve_one(client, tally, until, waiting))


async def ask_again(url: str, prompt: str, until: float, every: float, answers: list[str]) -> None:
    """Repeat the fixed greedy request while the other clients run."""
    async with connected(url) as http:
        while time.monotonic() < until:
            answers.append(await fixed_answer(http, prompt))
            await asyncio.sleep(min(every, max(0.0, until - time.monotonic())))


async def ask_every_length(http: httpx.AsyncClient, longest: int) -> None:
    """Send prompts of 1 to `longest` tokens, one at a time, all of them twice.

    On CPUs, oneDNN keeps kernels for each number of rows that a step had. This memory is filled
    once, and this fills it before memory is measured.
    """
    chance = random.Random(0)  # so that the prefix cache shortens no prompt
    for _ in range(2):
        for length in range(1, longest + 1):
            tokens = [chance.randrange(3, 1000) for _ in range(length)]
            body = {"model": MODEL, "prompt": tokens, "max_tokens": 1}
            (await http.post(COMPLETIONS, json=body)).raise_for_status()


async def fixed_answer(http: httpx.AsyncClient, prompt: str) -> str:
    """Return the text of a greedy completion, or the error's."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 48, "temperature": 0.0}
    try:
        answer = await http.post(COMPLETIONS, json=body)
        return str(answer.json()["choices"][0]["text"])
    except (httpx.HTTPError, ValueError, KeyError) as error:
        return f"no answer: {type(error).__name__} {error}"
