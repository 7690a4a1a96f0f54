"""What clients of a soak do: requests, and the HTTP statuses that each may end in.

Status 0 is a request that the client itself broke off. An error inside a stream counts as 500.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

MODEL = "soak"
OK, BAD, HUNG_UP = frozenset({200}), frozenset({400, 422}), frozenset({0})
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass
class Outcome:
    """How a request ended."""

    status: int
    detail: str = ""
    """What the server said, if the status is not 200."""
    text: str = ""
    gaps: list[float] = field(default_factory=list)
    """Seconds between the chunks of a stream."""


@dataclass
class Client:
    """One of many clients, with a random seed of its own."""

    http: httpx.AsyncClient
    prompts: list[str]
    max_model_len: int
    chance: random.Random

    def prompt(self) -> str:
        """Return a random prompt."""
        return self.chance.choice(self.prompts)

    def body(self, **changes: Any) -> dict[str, Any]:
        """Return the body of a greedy completion of moderate length."""
        tokens = self.chance.randint(8, 64)
        body = {"model": MODEL, "prompt": self.prompt(), "max_tokens": tokens, "temperature": 0.0}
        return body | changes

    async def post(self, path: str = COMPLETIONS, **changes: Any) -> Outcome:
        """Ask for a whole answer."""
        answer = await self.http.post(path, json=self.body(**changes))
        if answer.status_code != 200:
            return Outcome(answer.status_code, answer.text[:300])
        return Outcome(200, text=answer.json()["choices"][0].get("text", ""))

    async def stream(self, chunks: int | None = None, **changes: Any) -> Outcome:
        """Read a stream to its end, or `chunks` of it."""
        gaps: list[float] = []
        seen, last, ended = 0, None, False
        body = self.body(stream=True, **changes)
        async with self.http.stream("POST", COMPLETIONS, json=body) as answer:
            if answer.status_code != 200:
                return Outcome(answer.status_code, (await answer.aread()).decode()[:300])
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    ended = True
                    continue
                if "error" in json.loads(line[6:]):
                    return Outcome(500, line[:300])
                now = time.perf_counter()
                if last is not None:
                    gaps.append(now - last)
                last, seen = now, seen + 1
                if chunks is not None and seen >= chunks:
                    return Outcome(0, gaps=gaps)
        return Outcome(200, gaps=gaps) if ended else Outcome(500, "the stream was cut off")


async def _chat(client: Client) -> Outcome:
    body = {"model": MODEL, "messages": [{"role": "user", "content": client.prompt()}]}
    answer = await client.http.post(CHAT, json=body | {"max_tokens": 24, "temperature": 0.0})
    return Outcome(answer.status_code, "" if answer.status_code == 200 else answer.text[:300])


async def _hang_up_at_once(client: Client) -> Outcome:
    """Hang up before there is an answer, perhaps while the request still waits."""
    try:
        async with asyncio.timeout(client.chance.uniform(0.005, 0.3)):
            await client.post(max_tokens=300, ignore_eos=True)
    except TimeoutError:
        pass
    return Outcome(0)


def _tokens(client: Client, count: int) -> list[int]:
    return [client.chance.randrange(2, 2000) for _ in range(count)]


async def _fill_the_context(client: Client) -> Outcome:
    """Send a prompt near the limit, with room for four tokens."""
    tokens = _tokens(client, client.max_model_len - 4)
    return await client.post(prompt=tokens, max_tokens=4)


async def _run_into_the_limit(client: Client) -> Outcome:
    """Ask for as many tokens as fit into the context."""
    room = client.max_model_len - 100
    return await client.stream(prompt=_tokens(client, 100), max_tokens=room, ignore_eos=True)


async def _bad_json(client: Client) -> Outcome:
    body = '{"model": "' + MODEL + '", "prompt": '
    answer = await client.http.post(
        COMPLETIONS, content=body, headers={"content-type": "application/json"}
    )
    return Outcome(answer.status_code, answer.text[:300])


WRONG_TYPES: tuple[dict[str, Any], ...] = (
    {"temperature": "hot"},
    {"max_tokens": -1},
    {"max_tokens": "many"},
    {"prompt": {"text": "no"}},
    {"prompt": [1, "two"]},
    {"n": 0},
    {"top_p": 7},
    {"stop": [[1]]},
)


async def _wrong_types(client: Client) -> Outcome:
    return await client.post(**client.chance.choice(WRONG_TYPES))


Behave = Callable[[Client], Awaitable[Outcome]]


@dataclass(frozen=True)
class Behaviour:
    """Something that clients do, its weight, and the statuses it may end in."""

    name: str
    weight: float
    behave: Behave
    statuses: frozenset[int] = OK


BEHAVIOURS = (
    Behaviour("completion", 6, lambda c: c.post()),
    Behaviour("chat", 3, _chat),
    Behaviour("stream", 8, lambda c: c.stream()),
    Behaviour(
        "hang-up in mid-stream",
        4,
        lambda c: c.stream(c.chance.randint(1, 6), max_tokens=300, ignore_eos=True),
        HUNG_UP,
    ),
    Behaviour("hang-up before the answer", 2, _hang_up_at_once, HUNG_UP),
    Behaviour("sampled", 4, lambda c: c.post(temperature=0.9, top_p=0.9, top_k=40)),
    Behaviour("sampled stream", 2, lambda c: c.stream(temperature=1.0, seed=7)),
    Behaviour("n = 3", 2, lambda c: c.post(n=3, temperature=0.7)),
    Behaviour("stop strings", 2, lambda c: c.post(stop=["\n", "return"])),
    Behaviour("logprobs", 1, lambda c: c.post(logprobs=3)),
    Behaviour("penalties", 1, lambda c: c.post(repetition_penalty=1.2, presence_penalty=0.5)),
    Behaviour(
        "structured output",
        1,
        lambda c: c.post(structured_outputs={"regex": "[a-z]{3,8} = [0-9]{1,3}"}),
    ),
    Behaviour("prompt at the context limit", 1, _fill_the_context),
    Behaviour("output to the context limit", 1, _run_into_the_limit),
    Behaviour(
        "prompt beyond the context limit",
        1,
        lambda c: c.post(prompt=_tokens(c, c.max_model_len + c.chance.randint(0, 5000))),
        BAD,
    ),
    Behaviour("prompt of 200 kB", 0.3, lambda c: c.post(prompt="word " * 40_000), BAD),
    Behaviour("max_tokens of a billion", 1, lambda c: c.post(max_tokens=10**9), BAD),
    Behaviour("token ids out of range", 0.5, lambda c: c.post(prompt=[5, 10**6]), BAD),
    Behaviour("malformed JSON", 1, _bad_json, BAD),
    Behaviour("wrong types", 1, _wrong_types, BAD),
    Behaviour("unknown model", 1, lambda c: c.post(model="nobody"), frozenset({404})),
    Behaviour("unknown path", 0.5, lambda c: c.post("/v1/nowhere"), frozenset({404})),
)
