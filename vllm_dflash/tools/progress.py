"""Progress of a command; on standard error, apart from results."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

SECONDS_BETWEEN_LINES = 15.0
"""Interval between lines about the same stage."""


class Tell(Protocol):
    """Reports how much of a stage is done, and what is being done now."""

    def __call__(self, done: float, doing: str = "", /) -> None:
        """Report at any time."""


class Progress:
    """Prints what a command does, line by line; nothing without a file."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file

    def say(self, line: str) -> None:
        """Print a line."""
        if self._file is not None:
            print(line, file=self._file, flush=True)

    @contextmanager
    def stage(self, name: str, total: float | None = None, unit: str = "s") -> Iterator[Tell]:
        """Print a line when a stage begins, when it ends, and every 15 s in between.

        `total`: how much there is to do, in `unit` such as "texts"; None if unknown.
        """
        self.say(name if total is None else f"{name}: {total:g} {unit}")
        started = said = time.perf_counter()

        def tell(done: float, doing: str = "", /) -> None:
            nonlocal said
            if time.perf_counter() - said < SECONDS_BETWEEN_LINES:
                return
            said = time.perf_counter()
            share = "" if total is None else f"{done:.0f} of {total:g} {unit}"
            self.say(f"{name}: {', '.join(filter(None, [share, doing]))}")

        yield tell
        self.say(f"{name}: {time.perf_counter() - started:.1f} s")


def progress_on() -> Progress:
    """Return progress on standard error."""
    return Progress(sys.stderr)
