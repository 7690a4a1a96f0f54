"""Shared by tests of several rooms: pairs, engines, servers, clusters, watchers."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "models" / "demo"
TESTS = ROOT / "tests"


def importing_support() -> dict[str, str]:
    """Return the environment of a process that must find this package and the reference, too."""
    paths = [str(TESTS), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
