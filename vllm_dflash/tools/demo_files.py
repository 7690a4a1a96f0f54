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


def unpack_demo(goal: Path = IN_A_CLONE) -> bool:
    """Copy the demo pair to `goal`. Returns False, copying nothing, if `goal` exists."""
    if goal.exists():
        return False
    part = goal.with_name(f"{goal.name}.part")  # so that an interrupted copy is not taken for it
    shutil.rmtree(part, ignore_errors=True)
    for name in PARTS:
        source, copy = INSTALLED / name, part / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy)
        else:
            shutil.copyfile(source, copy)
    part.rename(goal)
    return True
