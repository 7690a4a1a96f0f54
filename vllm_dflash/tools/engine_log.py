"""What an engine that died left in its log."""

from __future__ import annotations

import re

LAST_LINES = 15
ERROR_LINE = re.compile(
    r"^(?:\(\w+ pid=\d+\) )?(?:\[rank\d+\]: )?(?:ERROR [^]]*\] )?"
    r"((?:\w+\.)*\w*(?:Error|Exception|Interrupt)(?:: .*)?)$",
    re.MULTILINE,
)
"""The last line of a traceback, with or without what vLLM and PyTorch put before it."""


def errors_in(log: str) -> list[str]:
    """The errors a log names, each of them once: the root cause first, then what it led to."""
    return list(dict.fromkeys(match.group(1) for match in ERROR_LINE.finditer(log)))


def describe_death(log: str) -> str:
    """The errors of a log, a line each; of a log without any, its end."""
    errors = errors_in(log)
    if errors:
        return "\n  ".join(["an engine died:", *errors])
    return "\n  ".join(["an engine died; the end of its log:", *log.splitlines()[-LAST_LINES:]])
