"""Progress of a command, for a terminal or a log; on standard error, apart from results."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
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

            self._terminal = Console(file=file)

    def stage(
        self, name: str, total: float | None = None, unit: str = "s"
    ) -> AbstractContextManager[Tell]:
        """Report a stage, which ends with the context.

        `total`: how much there is to do, in `unit` such as "texts"; None if unknown.
        """
        if self._terminal is None:
            return self._lines(name, total, unit)
        return _bar(self._terminal, name, total)

    def say(self, line: str) -> None:
        """Print a line that stays."""
        if self._terminal is not None:
            self._terminal.print(line, markup=False, highlight=False)
        elif self._file is not None:
            print(line, file=self._file, flush=True)

    @contextmanager
    def _lines(self, name: str, total: float | None, unit: str) -> Iterator[Tell]:
        """Print a line when the stage begins, when it ends, and every 15 s in between."""
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


@contextmanager
def _bar(terminal: Console, name: str, total: float | None) -> Iterator[Tell]:
    import rich.progress as bars

    columns = [bars.TextColumn("{task.description}", markup=False), bars.BarColumn()]
    columns += [] if total is None else [bars.MofNCompleteColumn()]
    columns.append(bars.TimeElapsedColumn())
    # Refresh rarely: the engines need the CPU.
    with bars.Progress(*columns, console=terminal, refresh_per_second=1) as shown:
        task = shown.add_task(name, total=total)

        def tell(done: float, doing: str = "", /) -> None:
            words = f"{name}: {doing}" if doing else name
            shown.update(task, completed=done, description=words)

        yield tell
        if total is None:
            shown.update(task, total=1, completed=1)


def progress_on() -> Progress:
    """Return progress on standard error."""
    return Progress(sys.stderr)
