"""What our own logger says, whatever vLLM makes of its loggers' handlers meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch


@contextmanager
def log_lines(name: str = "vllm.dflash") -> Iterator[list[str]]:
    """`LEVEL message` of each line."""
    lines: list[str] = []

    def keep(record: logging.LogRecord) -> None:
        lines.append(f"{record.levelname} {record.getMessage()}")

    with patch.object(logging.getLogger(name), "handle", keep):
        yield lines
