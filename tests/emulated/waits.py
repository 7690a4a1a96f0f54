"""Where the host waits for the device: by the innermost frames that are not PyTorch's."""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from emulated import torch_cuda

HERE = str(Path(__file__).parent)


@contextmanager
def places() -> Iterator[Counter[str]]:
    """Filled while what is inside runs: how often, by "wait" (nobody asked for it) or "asked",
    what for, and where."""
    found: Counter[str] = Counter()

    def note(kind: str, name: str) -> None:
        frames = traceback.extract_stack(sys._getframe(1), limit=40)
        near = [f for f in frames if "/torch/" not in f.filename and HERE not in f.filename][-3:]
        where = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(near))
        found[f"{kind} {name} @ {where}"] += 1

    torch_cuda.device().set_hook(note)
    try:
        yield found
    finally:
        torch_cuda.device().set_hook(None)
