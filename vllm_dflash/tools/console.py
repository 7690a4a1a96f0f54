"""What the commands print, for a person who looks or for a pipe, and how they end."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vllm_dflash.tools.tables import Table

if TYPE_CHECKING:
    from rich.console import Console

COULD_NOT_RUN, INTERRUPTED, TERMINATED = 2, 130, 143
"""Exit codes."""
WIDTH_OF_FILES = 120


def output_console() -> Console:
    """Standard output: as wide as the terminal, or wide enough for the tables in a file."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else WIDTH_OF_FILES)


def print_report(tables: Iterable[Table], notes: Iterable[str] = ()) -> None:
    """Tables where a person looks, plain text elsewhere; then lines of text as they are."""
    if sys.stdout.isatty():
        console = output_console()
        for table in tables:
            console.print(table.rich())
        print()
    else:
        for table in tables:
            print(f"{table.plain()}\n")
    for note in notes:
        print(note)
    sys.stdout.flush()


def complain(command: str, message: object) -> None:
    """Say on standard error why a command did not do what it was asked for."""
    print(f"vllm-dflash {command}: {message}", file=sys.stderr)


@contextmanager
def terminable() -> Iterator[None]:
    """A time limit or a cancelled job ends this as Ctrl-C does: with all that it has started."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
