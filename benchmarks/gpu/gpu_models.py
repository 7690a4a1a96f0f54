"""Folders of the pairs that are made for a run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

IN_MEMORY = Path("/dev/shm")
MODELS = f"vllm-dflash-gpu-{os.getuid()}"


def models_folder(name: str, num_bytes: int, otherwise: Path) -> Path:
    """Choose the folder of a pair: in memory if there is room, which is fast and spares the disk.

    A pair in memory is removed at the end of a run (`forget_models`), and made again for the next.
    """
    folder = IN_MEMORY / MODELS / name
    has_room = free_bytes() > 1.5 * num_bytes + 2**28
    return folder if folder.is_dir() or has_room else otherwise / name


def free_bytes() -> int:
    """Return how many bytes can be written into memory."""
    return shutil.disk_usage(IN_MEMORY).free if os.access(IN_MEMORY, os.W_OK) else 0


def forget_models() -> None:
    """Free the memory."""
    shutil.rmtree(IN_MEMORY / MODELS, ignore_errors=True)
