"""What goes on, for a person who looks or for a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TextIO

OnProgress = Callable[[int], None]
"""Told how many texts are done."""


class Progress(Protocol):
    """Told what the gate does."""

    def stage(self, name: str, texts: int | None) -> AbstractContextManager[OnProgress]:
        """So many texts are worked on; None: nobody knows how much there is to do."""


class Silent:
    """For those who do not want to know."""

    @contextmanager
    def stage(self, name: str, texts: int | None) -> Iterator[OnProgress]:
        """See `Progress`."""
        yield lambda done: None


class Lines:
    """A line when something begins, and one when it has ended."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    @contextmanager
    def stage(self, name: str, texts: int | None) -> Iterator[OnProgress]:
        """See `Progress`."""
        of = "" if texts is None else f": {texts} texts"
        print(f"{name}{of}", file=self._file, flush=True)
        started = time.perf_counter()
        yield lambda done: None
        print(f"{name}: {time.perf_counter() - started:.1f} s", file=self._file, flush=True)


class Bars:
    """A bar for each stage."""

    def __init__(self, file: TextIO) -> None:
        from rich.console import Console

        self._console = Console(file=file)

    @contextmanager
    def stage(self, name: str, texts: int | None) -> Iterator[OnProgress]:
        """See `Progress`."""
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        columns = [TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()]
        if texts is not None:
            columns.insert(2, MofNCompleteColumn())
        # The engines need the processor.
        with RichProgress(*columns, console=self._console, refresh_per_second=2) as bars:
            task = bars.add_task(name, total=texts)
            yield lambda done: bars.update(task, completed=done)
            if texts is None:
                bars.update(task, total=1, completed=1)


def progress_on(file: TextIO = sys.stderr) -> Bars | Lines:
    """Bars on a terminal, lines elsewhere."""
    return Bars(file) if file.isatty() else Lines(file)
