"""A planted bug: one edit of one file, and what a user would see of it."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

HERE = Path(__file__).parent
NAMES = ("shared", "v1", "v2", "decisions_v2", "trees", "tree_kernels", "gpu_arithmetic")
FRESH = ("fresh_planning_v1", "fresh_v2_tools", "fresh_second")
"""Planted without having read the tests."""
LISTS = tuple(HERE / f"{name}.toml" for name in NAMES + FRESH)
OF_GPUS = (HERE / "cuda_fresh.toml",)
"""Planted with tests on the emulated GPU: `-- tests/engine/test_emulated_engines.py --emulated`."""


@dataclass(frozen=True)
class Fault:
    """One planted bug."""

    name: str
    file: str
    harm: str
    """What a user would see."""
    old: str
    """Occurs once in the file."""
    new: str

    def planted(self, root: Path) -> str:
        """Return the file's text with the fault.

        Raises:
            ValueError: the text to replace does not occur exactly once.
        """
        text = (root / self.file).read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: found {text.count(self.old)} times in {self.file}")
        return text.replace(self.old, self.new)


def read_faults(lists: Iterable[Path] = LISTS) -> list[Fault]:
    """Return all faults of these lists; keys that are not a fault's are left out."""
    keys = {field.name for field in fields(Fault)}
    return [
        Fault(**{key: value for key, value in entry.items() if key in keys})
        for path in lists
        for entry in tomllib.loads(path.read_text())["fault"]
    ]
