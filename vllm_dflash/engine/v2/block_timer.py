"""Times blocks where they run: on the device, by events, or on the host if that is a CPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch


class BlockTime(NamedTuple):
    """Start and end of a step's blocks, and of storing their context."""

    start: torch.cuda.Event | float
    end: torch.cuda.Event | float

    def seconds(self) -> float:
        """Duration. Call this only once a later step's work has arrived, so that none waits."""
        start, end = self
        if isinstance(start, float) or isinstance(end, float):
            return float(end) - float(start)  # type: ignore[arg-type]
        return float(start.elapsed_time(end)) / 1000.0


class BlockTimer:
    """Times the blocks of each step, to be read one step later."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._newest: BlockTime | None = None
        self._previous: BlockTime | None = None

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Time the blocks that run inside."""
        start = self._now()
        yield
        self._newest = BlockTime(start, self._now())

    def end_step(self) -> BlockTime | None:
        """Return the time of the previous step's blocks; None if it had none."""
        previous, self._previous, self._newest = self._previous, self._newest, None
        return previous

    def _now(self) -> torch.cuda.Event | float:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
