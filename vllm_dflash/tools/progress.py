"""What goes on, for a person who looks or for a log. On standard error: results go elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

SECONDS_BETWEEN_LINES = 15.0
"""A log is told so often what goes on inside a stage."""


class Tell(Protocol):
    """Told how much of a stage is done, and what is being done now."""

    def __call__(self, done: float, doing: str = "", /) -> None:
        """Anything may be told at any time."""


class Progress:
    """Told what a command does; whoever shows it derives from this."""

    @contextmanager
    def stage(self, name: str, total: float | None = None, unit: str = "s") -> Iterator[Tell]:
        """Something begins, and ends with the context.

        `total` is how much there is to do, of a `unit` such as "texts". None: nobody knows.
        """
        yield lambda done, doing="": None

    def say(self, line: str) -> None:
        """Something that is to stay."""


class Silent(Progress):
    """For those who do not want to know."""


class Lines(Progress):
    """A line when something begins, one now and then, and one when it has ended."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    @contextmanager
    def stage(self, name: str, total: float | None = None, unit: str = "s") -> Iterator[Tell]:
        """See `Progress`."""
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

    def say(self, line: str) -> None:
        """See `Progress`."""
        print(line, file=self._file, flush=True)


class Bars(Progress):
    """A bar for each stage."""

    def __init__(self, file: TextIO) -> None:
        from rich.console import Console

        self._console = Console(file=file)

    @contextmanager
    def stage(self, name: str, total: float | None = None, unit: str = "s") -> Iterator[Tell]:
        """See `Progress`."""
        import rich.progress as bars

        columns = [bars.TextColumn("{task.description}", markup=False), bars.BarColumn()]
        columns += [] if total is None else [bars.MofNCompleteColumn()]
        columns.append(bars.TimeElapsedColumn())
        # The engines need the processor.
        with bars.Progress(*columns, console=self._console, refresh_per_second=1) as shown:
            task = shown.add_task(name, total=total)

            def tell(done: float, doing: str = "", /) -> None:
                words = f"{name}: {doing}" if doing else name
                shown.update(task, completed=done, description=words)

            yield tell
            if total is None:
                shown.update(task, total=1, completed=1)

    def say(self, line: str) -> None:
        """See `Progress`."""
        self._console.print(line, markup=False, highlight=False)


def progress_on(file: TextIO | None = None) -> Bars | Lines:
    """Bars on a terminal, lines elsewhere; on standard error unless told otherwise."""
    file = file or sys.stderr
    return Bars(file) if file.isatty() else Lines(file)
