"""Where the commands print their tables."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

WIDTH_OF_FILES = 120


def output_console() -> Console:
    """Standard output: as wide as the terminal, or wide enough for the tables in a file."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else WIDTH_OF_FILES)
