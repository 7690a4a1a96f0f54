"""Waiting for a state, however busy the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import psutil

PATIENCE_S = 500.0
"""Time for what takes seconds on an idle machine, and up to two minutes if two slow cores run other
tests, too."""


def wait_until(condition: Callable[[], object], what: str, seconds: float = PATIENCE_S) -> None:
    """Check again and again. Raise `AssertionError` with `what` was waited for."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain: {what}"
        time.sleep(0.05)


def wait_for_end(processes: Iterable[psutil.Process]) -> None:
    """Wait until all have ended. Raise `AssertionError` with those that still run."""
    _, alive = psutil.wait_procs(list(processes), timeout=PATIENCE_S)
    assert not alive, f"after {PATIENCE_S:g} s there still are {alive}"
