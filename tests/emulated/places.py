"""Places where the host waits for the device: the innermost frames outside PyTorch."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from emulated import torch_cuda

HERE = str(Path(__file__).parent)


def here() -> str:
    """Return the place of the call: at most three frames, innermost first."""
    frames: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(frames) < 3:
        file = frame.f_code.co_filename
        if "/torch/" not in file and HERE not in file:
            frames.append(f"{Path(file).name}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(frames)


@contextmanager
def of_waits() -> Iterator[Counter[str]]:
    """Count waits inside the block, by kind ("asked", or "wait" if it was not asked for), cause and
    place."""
    found: Counter[str] = Counter()

    def note(kind: str, name: str) -> None:
        found[f"{kind} {name} @ {here()}"] += 1

    torch_cuda.device().set_hook(note)
    try:
        yield found
    finally:
        torch_cuda.device().set_hook(None)
