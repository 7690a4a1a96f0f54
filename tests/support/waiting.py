"""Waiting for a state, however busy the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import psutil

PATIENCE_S = 500.0
"""For what takes seconds on a machine that has nothing else to do, and up to two minutes where two
slow cores run other tests beside it."""


def wait_until(condition: Callable[[], object], what: str, seconds: float = PATIENCE_S) -> None:
    """Look again and again. Raises `AssertionError` with `what` was waited for."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain: {what}"
        time.sleep(0.05)


def wait_for_end(processes: Iterable[psutil.Process]) -> None:
    """Wait for the end of all. Raises `AssertionError` with those that go on."""
    _, alive = psutil.wait_procs(list(processes), timeout=PATIENCE_S)
    assert not alive, f"after {PATIENCE_S:g} s there still are {alive}"
