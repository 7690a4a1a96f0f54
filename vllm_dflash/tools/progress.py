"""What goes on, for a person who looks or for a log. On standard error: results go elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from rich.console import Console

SECONDS_BETWEEN_LINES = 15.0
"""A log is told so often what goes on inside a stage."""


class Tell(Protocol):
    """Told how much of a stage is done, and what is being done now."""

    def __call__(self, done: float, doing: str = "", /) -> None:
        """Anything may be told at any time."""


class Progress:
    """Told what a command does; shows bars on a terminal, lines in a log, else nothing."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file
        self._terminal: Console | None = None
        if file is not None and file.isatty():
            from rich.console import Console

            self._terminal = Console(file=file)

    def stage(
        self, name: str, total: float | None = None, unit: str = "s"
    ) -> AbstractContextManager[Tell]:
        """Something begins, and ends with the context.

        `total` is how much there is to do, of a `unit` such as "texts". None: nobody knows.
        """
        if self._terminal is None:
            return self._lines(name, total, unit)
        return _bar(self._terminal, name, total)

    def say(self, line: str) -> None:
        """Something that is to stay."""
        if self._terminal is not None:
            self._terminal.print(line, markup=False, highlight=False)
        elif self._file is not None:
            print(line, file=self._file, flush=True)

    @contextmanager
    def _lines(self, name: str, total: float | None, unit: str) -> Iterator[Tell]:
        """One when it begins, one now and then, and one when it has ended."""
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
    # The engines need the processor.
    with bars.Progress(*columns, console=terminal, refresh_per_second=1) as shown:
        task = shown.add_task(name, total=total)

        def tell(done: float, doing: str = "", /) -> None:
            words = f"{name}: {doing}" if doing else name
            shown.update(task, completed=done, description=words)

        yield tell
        if total is None:
            shown.update(task, total=1, completed=1)


def progress_on() -> Progress:
    """On standard error."""
    return Progress(sys.stderr)
