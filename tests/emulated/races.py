"""Find missing waits under any schedule, by vector clocks (`device/clocks.h`, `device/races.h`)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from emulated import torch_cuda

HERE = str(Path(__file__).parent)


@contextmanager
def found(*, tells_places: bool = False) -> Iterator[dict[str, int]]:
    """Count pairs of operations without an order that touch the same bytes, one of them writing.

    The dictionary is filled at the end. `tells_places`: also say where each was launched or freed,
    which takes longer. Capture graphs inside, too. A graph's operations on several streams count
    as run one after the other.
    """
    device = torch_cuda.device()
    device.find_races(True)
    device.set_place(here if tells_places else None)
    races: dict[str, int] = {}
    try:
        yield races
        torch.cuda.synchronize()
        races.update(device.races())
    finally:
        device.find_races(False)
        device.set_place(None)


def forget() -> None:
    """Drop the races found so far, from a start whose outputs are not read."""
    torch_cuda.device().find_races(True)


def here() -> str:
    """Return the place of the call: at most three frames outside PyTorch, innermost first."""
    frames: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(frames) < 3:
        file = frame.f_code.co_filename
        if "/torch/" not in file and HERE not in file:
            frames.append(f"{Path(file).name}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(frames)


def watch_kernels(interpreter: Any, device: Any) -> None:
    """Make kernels in Triton's interpreter report which bytes they load and store."""
    library = interpreter._interpreter

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(library, name)

        @staticmethod
        def load(pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
            if device.finds_races():
                _touch(device, pointers, mask, np.dtype(dtype).itemsize, writes=False)
            return library.load(pointers, mask, other, dtype)

        @staticmethod
        def store(pointers: Any, values: Any, mask: Any) -> Any:
            if device.finds_races():
                _touch(device, pointers, mask, values.itemsize, writes=True)
            return library.store(pointers, values, mask)

        @staticmethod
        def atomic_rmw(kind: Any, pointers: Any, values: Any, mask: Any, semantic: Any) -> Any:
            if device.finds_races():
                _touch(device, pointers, mask, values.itemsize, writes=True)
            return library.atomic_rmw(kind, pointers, values, mask, semantic)

    interpreter._interpreter = Watched()


def _touch(device: Any, pointers: np.ndarray, mask: np.ndarray, size: int, *, writes: bool) -> None:
    """Report the touched bytes as contiguous pieces."""
    used = np.unique(pointers[np.broadcast_to(mask.astype(bool), pointers.shape)].astype(np.uint64))
    if not len(used):
        return
    first = np.concatenate(([True], np.diff(used) > size))
    last = np.concatenate((first[1:], [True]))
    device.touch_now(used[first].tolist(), (used[last] + np.uint64(size)).tolist(), writes)
