"""Messages between the engine's process and its workers.

vLLM pickles a step's `SchedulerOutput` and `ModelRunnerOutput` with all their attributes. So our
messages are attributes of these, and need no separate call. Each message is defined beside its
content.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Content = TypeVar("Content")


@dataclass(frozen=True)
class Message(Generic[Content]):
    """One kind of message."""

    name: str
    """Name of the attribute that holds the content."""

    def attach(self, carrier: Any, content: Content) -> None:
        """Send `content` with one of vLLM's objects."""
        setattr(carrier, self.name, content)

    def on(self, carrier: Any) -> Content | None:
        """Content that came with one of vLLM's objects; None if there is none."""
        return getattr(carrier, self.name, None)
