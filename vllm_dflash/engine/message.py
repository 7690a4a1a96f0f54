"""How anything of ours travels between the engine's process and its workers.

A step's `SchedulerOutput` and `ModelRunnerOutput` are pickled with whatever attributes they have.
So what we have to say goes along with them, and no call is made for it. Each kind stands beside
what it holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Content = TypeVar("Content")


@dataclass(frozen=True)
class Message(Generic[Content]):
    """One kind of message."""

    name: str
    """Name of the attribute that holds it."""

    def attach(self, carrier: Any, content: Content) -> None:
        """Send it along with one of vLLM's objects."""
        setattr(carrier, self.name, content)

    def on(self, carrier: Any) -> Content | None:
        """What came with one of vLLM's objects, if anything did."""
        return getattr(carrier, self.name, None)
