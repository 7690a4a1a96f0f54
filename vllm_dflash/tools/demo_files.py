"""Finds the demo pair's files, in a clone of the repository or in the installed package."""

from __future__ import annotations

import shutil
from pathlib import Path

IN_A_CLONE = Path("models/demo")
"""Where the documentation's examples expect the demo pair."""
INSTALLED = Path(__file__).parent.parent / "demo_pair"
"""A link to `models/demo` in a clone; a wheel contains the files."""
PARTS = ("README.md", "held_out.jsonl", "target", "drafter")
"""Files and folders of the demo pair that a wheel contains."""


def demo_folder() -> Path:
    """Return the demo pair's folder, as a short relative path if possible."""
    return IN_A_CLONE if (IN_A_CLONE / "target").is_dir() else INSTALLED


def unpack_demo() -> bool:
    """Copy the demo pair to `IN_A_CLONE`. Returns False, copying nothing, if that exists."""
    if IN_A_CLONE.exists():
        return False
    part = IN_A_CLONE.with_suffix(".part")  # so that an interrupted copy is not taken for it
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for name in PARTS:
        if (source := INSTALLED / name).is_dir():
            shutil.copytree(source, part / name)
        else:
            shutil.copyfile(source, part / name)
    part.rename(IN_A_CLONE)
    return True
