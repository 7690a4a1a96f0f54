"""The engines of a comparison: they start side by side where that is safe, and stay so."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from vllm_dflash.tools.bench.sides import OURS, Side, side_environment
from vllm_dflash.tools.engine_answers import Facts
from vllm_dflash.tools.engine_process import EngineProcess
from vllm_dflash.tools.progress import Progress


@dataclass
class SideEngines:
    """One for each side, in processes of their own, until the context ends."""

    arguments: dict[str, Any]
    """Of every engine."""
    at_once: int
    """Engines that may start at the same time, if there is memory for them."""
    logs: Path
    """A folder."""
    progress: Progress
    _children: dict[str, EngineProcess] = field(default_factory=dict)
    _memory: int = 0
    """Bytes that the first one took."""

    def start(self, sides: Sequence[Side]) -> list[Facts]:
        """Start an engine for each of these sides, and return what they say about themselves.

        The first one starts alone: what it takes says how many find room after it. That one is
        ours, which times its own costs at the end of its start, and nobody may disturb it then.
        """
        waiting = sorted(sides, key=lambda side: side.name != OURS)
        facts: list[Facts] = []
        with self.progress.stage("starting the engines", len(sides), "engines") as tell:
            while waiting:
                room = self._room()
                crowd, waiting = waiting[:room], waiting[room:]
                names, began = ", ".join(side.name for side in crowd), time.monotonic()
                tell(len(facts), f"{names} on the way")
                children = [self._launch(side) for side in crowd]
                facts += [child.receive() for child in children]
                self._memory = self._memory or children[0].memory()
                self.progress.say(f"up after {time.monotonic() - began:.0f} s: {names}")
        return facts

    def ask(self, name: str, question: str, **arguments: Any) -> Any:
        """Of the side of that name; see `EngineProcess.ask`."""
        return self._children[name].ask(question, **arguments)

    def _launch(self, side: Side) -> EngineProcess:
        child = EngineProcess(
            self.logs / f"{side.name.replace(' ', '-')}.log",
            environment=side_environment(side.plugins),
            speculative_config=side.speculative_config,
            **self.arguments,
        )
        self._children[side.name] = child
        child.send("facts")
        return child

    def _room(self) -> int:
        """How many may start now."""
        import psutil

        if not self._memory:
            return 1
        return max(1, min(self.at_once, psutil.virtual_memory().available // self._memory))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        with ExitStack() as stack:
            for child in self._children.values():
                stack.push(child)
            for child in self._children.values():
                child.dismiss()  # all of them, before the first is waited for
