"""What a load needs of an engine."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Output(NamedTuple):
    """What one step made of one request."""

    request_id: str
    new_tokens: int
    finished: bool


class Engine(Protocol):
    """An engine and its clock."""

    def add(self, request_id: str, prompt: str, max_tokens: int) -> None:
        """Queue a request that will get exactly this many tokens."""

    def step(self) -> list[Output]:
        """Wait for the next outputs. Only while a request is in flight."""

    def abort(self, request_ids: list[str]) -> None:
        """Forget these requests; nothing more is heard of them."""

    def now(self) -> float:
        """Seconds since some moment."""

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
