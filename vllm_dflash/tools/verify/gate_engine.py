"""What the gate needs of an engine. Everything that crosses is plain, so that JSON can carry it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

SECONDS_BETWEEN_LOOKS = 0.5


@dataclass(frozen=True)
class Facts:
    """About an engine."""

    dtype: str
    max_model_len: int
    max_num_seqs: int
    stop_tokens: list[int]
    """Tokens that end a text."""
    drafter: str | None
    """Who drafts; None: nobody."""
    versions: dict[str, str]


class Request(NamedTuple):
    """Tokens to continue, greedily."""

    tokens: Sequence[int]
    max_tokens: int
    scored: int | None = None
    """A token whose regret as the next one is wanted."""


class Finished(NamedTuple):
    """A request that is done."""

    number: int
    """Which of those submitted, from 0."""
    tokens: list[int]
    """A stop token included."""
    regret: float | None
    """Of the request's `scored`, in nat."""


class Engine(Protocol):
    """An engine that runs so many requests at a time."""

    def facts(self) -> Facts:
        """What it is; waits until it has started."""

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Tokens of each text, as a prompt."""

    def decode(self, tokens: list[int]) -> list[str]:
        """The text of each token."""

    def submit(self, requests: Sequence[Request], concurrency: int) -> None:
        """Queue requests; so many of them are worked on at a time. The last ones are finished."""

    def advance(self, seconds: float) -> list[Finished]:
        """Work for about so long, or until all is done. Returns what was finished meanwhile."""

    def counts(self) -> dict[str, float]:
        """vLLM's counters of speculative decoding since it started: drafts (steps of a request
        that verified any), draft_tokens, accepted_tokens. Empty without it."""


OpenEngine = Callable[[], AbstractContextManager[Engine]]
"""Starts an engine, which ends with the context."""


def complete(
    engine: Engine,
    requests: Sequence[Request],
    concurrency: int,
    on_finished: Callable[[int], None] = lambda count: None,
) -> list[Finished]:
    """Run requests to their ends, in the order given. `on_finished` is told how many are done."""
    engine.submit(requests, concurrency)
    finished: dict[int, Finished] = {}
    while len(finished) < len(requests):
        finished |= {one.number: one for one in engine.advance(SECONDS_BETWEEN_LOOKS)}
        on_finished(len(finished))
    return [finished[number] for number in range(len(requests))]
