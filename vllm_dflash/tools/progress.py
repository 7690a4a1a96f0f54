"""What goes on, for a person who looks or for a log. On standard error: results go elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TextIO


class Tell(Protocol):
    """Told how much of a stage is done, and what is being done now."""

    def __call__(self, done: float, doing: str = "", /) -> None:
        """Anything may be told at any time."""


class Progress(Protocol):
    """Told what a command does."""

    def stage(
        self, name: str, total: float | None = None, unit: str = ""
    ) -> AbstractContextManager[Tell]:
        """Something begins, and ends with the context.

        Args:
            name: what it is called.
            total: how much there is to do; None: nobody knows.
            unit: of what there is to do, such as "texts"; none: it is the time that it may take.
        """

    def say(self, line: str) -> None:
        """Something that is to stay."""


SECONDS_BETWEEN_LINES = 15.0
"""A log is told so often what goes on inside a stage."""


class Silent:
    """For those who do not want to know."""

    @contextmanager
    def stage(self, name: str, total: float | None = None, unit: str = "") -> Iterator[Tell]:
        """See `Progress`."""
        yield lambda done, doing="": None

    def say(self, line: str) -> None:
        """See `Progress`."""


class Lines:
    """A line when something begins, one now and then, and one when it has ended."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    @contextmanager
    def stage(self, name: str, total: float | None = None, unit: str = "") -> Iterator[Tell]:
        """See `Progress`."""
        self.say(f"{name}: {total} {unit}" if unit else name)
        started = said = time.perf_counter()

        def tell(done: float, doing: str = "", /) -> None:
            nonlocal said
            if time.perf_counter() - said < SECONDS_BETWEEN_LINES:
                return
            said = time.perf_counter()
            share = (
                f"{done:.0f} of {total} {unit}" if unit else f"{done / total:.0%}" if total else ""
            )
            self.say(f"{name}: {', '.join(filter(None, [share, doing]))}")

        yield tell
        self.say(f"{name}: {time.perf_counter() - started:.1f} s")

    def say(self, line: str) -> None:
        """See `Progress`."""
        print(line, file=self._file, flush=True)


class Bars:
    """A bar for each stage."""

    def __init__(self, file: TextIO) -> None:
        from rich.console import Console

        self._console = Console(file=file)

    @contextmanager
    def stage(self, name: str, total: float | None = None, unit: str = "") -> Iterator[Tell]:
        """See `Progress`."""
        import rich.progress as bars

        columns = [bars.TextColumn("{task.description}", markup=False), bars.BarColumn()]
        columns += [bars.MofNCompleteColumn()] if unit else []
        columns.append(bars.TimeElapsedColumn())
        if total is not None and not unit:
            columns += [bars.TextColumn("left:"), bars.TimeRemainingColumn()]
        # The engines need the processor.
        with bars.Progress(*columns, console=self._console, refresh_per_second=1) as shown:
            task = shown.add_task(name, total=total)

            def tell(done: float, doing: str = "", /) -> None:
                shown.update(
                    task, completed=done, description=f"{name}: {doing}" if doing else name
                )

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
