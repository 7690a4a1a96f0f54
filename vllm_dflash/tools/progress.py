"""Progress of a command, for a terminal or a log; on standard error, apart from results."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from rich.console import Console

SECONDS_BETWEEN_LINES = 15.0
"""Interval between lines about the same stage in a log."""


class Tell(Protocol):
    """Reports how much of a stage is done, and what is being done now."""

    def __call__(self, done: float, doing: str = "", /) -> None:
        """Report at any time."""


class Progress:
    """Reports what a command does: bars on a terminal, lines in a log, nothing without a file."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file
        self._terminal: Console | None = None
        if file is not None and file.isatty():
            from rich.console import Console

            console = Console(file=file)
            # On a terminal that cannot move its cursor, rich shows a bar only when it is done.
            self._terminal = None if console.is_dumb_terminal else console

    def say(self, line: str) -> None:
        """Print a line that stays."""
        if self._terminal is not None:
            # The terminal wraps lines, which keeps columns together where there is room.
            self._terminal.print(line, markup=False, highlight=False, soft_wrap=True)
        elif self._file is not None:
            print(line, file=self._file, flush=True)

    @contextmanager
    def stage(self, name: str, total: float | None = None, unit: str = "s") -> Iterator[Tell]:
        """Report a stage, which ends with the context.

        `total`: how much there is to do, in `unit` such as "texts"; None if unknown.
        """
        if self._terminal is not None:
            with self._bar(name, total) as tell:
                yield tell
            return
        self.say(name if total is None else f"{name}: {total:g} {unit}")
        started = said = time.perf_counter()

        def line(done: float, doing: str = "", /) -> None:
            nonlocal said
            if time.perf_counter() - said < SECONDS_BETWEEN_LINES:
                return
            said = time.perf_counter()
            share = "" if total is None else f"{done:.0f} of {total:g} {unit}"
            self.say(f"{name}: {', '.join(filter(None, [share, doing]))}")

        yield line
        self.say(f"{name}: {time.perf_counter() - started:.1f} s")

    @contextmanager
    def _bar(self, name: str, total: float | None) -> Iterator[Tell]:
        """Show a bar, which prints what is said meanwhile above itself."""
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        count = TextColumn("" if total is None else "{task.completed:.0f}/{task.total:.0f}")
        columns = TextColumn("{task.description}", markup=False), BarColumn(), count
        # Refresh rarely: the engines need the CPU.
        with Progress(
            *columns, TimeElapsedColumn(), console=self._terminal, refresh_per_second=1
        ) as bars:
            task = bars.add_task(name, total=total)
            yield lambda done, doing="": bars.update(
                task, completed=done, description=f"{name}: {doing}" if doing else name
            )


def progress_on() -> Progress:
    """Return progress on standard error."""
    return Progress(sys.stderr)
