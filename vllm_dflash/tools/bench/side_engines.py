"""The engines of a comparison: they start side by side where that is safe, and stay so."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from vllm_dflash.tools.bench.sides import OURS, Side, side_environment
from vllm_dflash.tools.engine_answers import Facts
from vllm_dflash.tools.engine_process import EngineProcess
from vllm_dflash.tools.progress import Progress

SECONDS_TO_START = 60.0
"""About; of an engine on two cores that it has for itself."""
CROWDED = 1.3
"""How much longer those take that start at the same time, as many as there are cores."""
SECONDS_BETWEEN_LOOKS = 1.0


def seconds_to_start(count: int, at_once: int) -> float:
    """About, of so many engines: the first one alone, then as many at a time as may be."""
    crowds = math.ceil((count - 1) / at_once)
    return SECONDS_TO_START * (1 + crowds * (CROWDED if at_once > 1 else 1))


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
        waiting = deque(sorted(sides, key=lambda side: side.name != OURS))
        starting: dict[EngineProcess, tuple[str, float]] = {}
        facts: list[Facts] = []
        with self.progress.stage("starting the engines", len(sides), "engines") as tell:
            while waiting or starting:
                while waiting and len(starting) < self._room():
                    side = waiting.popleft()
                    starting[self._launch(side)] = side.name, time.monotonic()
                names = ", ".join(name for name, _ in starting.values())
                tell(len(sides) - len(waiting) - len(starting), f"{names} on the way")
                for child in EngineProcess.to_receive(starting, SECONDS_BETWEEN_LOOKS):
                    name, began = starting.pop(child)
                    facts.append(child.receive())
                    self._memory = self._memory or child.memory()
                    self.progress.say(f"{name} is up after {time.monotonic() - began:.0f} s")
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
        """How many may be on the way now."""
        import psutil

        if not self._memory:
            return 1
        return max(1, min(self.at_once, psutil.virtual_memory().available // self._memory))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with ExitStack() as stack:
            for child in self._children.values():
                stack.push(child)
            for child in self._children.values():
                child.dismiss()  # all of them, before the first is waited for
