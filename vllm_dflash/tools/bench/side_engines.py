"""The engines of a comparison: they start side by side where that is safe, and stay so."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from vllm_dflash.tools.bench.sides import OURS, Side
from vllm_dflash.tools.engine_answers import Facts
from vllm_dflash.tools.engine_process import EngineProcess
from vllm_dflash.tools.progress import Progress


@dataclass
class SideEngines:
    """One for each side, in processes of their own, until the context ends."""

    arguments: dict[str, Any]
    """Of every engine."""
    at_once: int
    """Engines that may start at the same time."""
    logs: Path
    """A folder."""
    progress: Progress
    _children: dict[str, EngineProcess] = field(default_factory=dict)

    def start(self, sides: Sequence[Side]) -> list[Facts]:
        """Start an engine for each of these sides, and return what they say about themselves.

        The first one starts alone: that is ours, which times its own costs at the end of its start,
        and nobody may disturb it then.
        """
        waiting = sorted(sides, key=lambda side: side.name != OURS)
        facts: list[Facts] = []
        with self.progress.stage("starting the engines", len(sides), "engines") as tell:
            while waiting:
                room = self.at_once if self._children else 1
                crowd, waiting = waiting[:room], waiting[room:]
                names, began = ", ".join(side.name for side in crowd), time.monotonic()
                tell(len(facts), f"{names} on the way")
                for side in crowd:
                    self._children[side.name] = side.start(self.logs, **self.arguments)
                    self._children[side.name].send("facts")
                for side in crowd:
                    facts.append(self._children[side.name].receive())
                    tell(len(facts), f"{side.name} is up")
                self.progress.say(f"up after {time.monotonic() - began:.0f} s: {names}")
        return facts

    def ask(self, name: str, question: str, **arguments: Any) -> Any:
        """Of the side of that name; see `EngineProcess.ask`."""
        return self._children[name].ask(question, **arguments)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        with ExitStack() as stack:
            for child in self._children.values():
                stack.push(child)
            for child in self._children.values():
                child.dismiss()  # all of them, before the first is waited for
