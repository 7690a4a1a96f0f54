"""How commands print, to a terminal or a pipe, and how they end."""

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


def output_console() -> Console:
    """Return standard output: as wide as the terminal, or 120 columns in a file."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 120)


def print_report(tables: Iterable[Table], notes: Iterable[str] = ()) -> None:
    """Print tables, drawn on a terminal and as plain text elsewhere, then the notes."""
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
    """Print to standard error why a command failed."""
    print(f"{command}: {message}", file=sys.stderr)


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM, as from a time limit, end the command and what it started, like Ctrl-C."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
