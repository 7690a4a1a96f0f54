"""Lines of our own logger, whatever vLLM does to its loggers' handlers and levels meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch


@contextmanager
def log_lines() -> Iterator[list[str]]:
    """Collect `LEVEL message` of each line."""
    lines: list[str] = []

    def keep(record: logging.LogRecord) -> None:
        lines.append(f"{record.levelname} {record.getMessage()}")

    logger = logging.getLogger("vllm.dflash")
    level = logger.level
    logger.setLevel(logging.INFO)  # vLLM sets one with the first engine's config, not before
    try:
        with patch.object(logger, "handle", keep):
            yield lines
    finally:
        logger.setLevel(level)
