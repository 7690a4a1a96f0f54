"""The demo pair's files: in a clone of the repository, or as they come with the package."""

from __future__ import annotations

import shutil
from pathlib import Path

IN_A_CLONE = Path("models/demo")
"""Where all examples of the documentation look for it."""
INSTALLED = Path(__file__).parent.parent / "demo_pair"
"""In a clone a link to `models/demo`; a wheel has the files themselves."""
PARTS = ("README.md", "held_out.jsonl", "target", "drafter")
"""What a wheel has of it."""


def demo_folder() -> Path:
    """Where the demo pair is, named as briefly as can be."""
    return IN_A_CLONE if (IN_A_CLONE / "target").is_dir() else INSTALLED


def unpack_demo(goal: Path = IN_A_CLONE) -> bool:
    """Copy the pair to where the examples look for it. False where something is there already."""
    if goal.exists():
        return False
    part = goal.with_name(f"{goal.name}.part")  # what is broken off does not count as there
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
