"""What tests of several rooms share: pairs, engines, servers, clusters, watchers."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "models" / "demo"
TESTS = ROOT / "tests"


def importing_support() -> dict[str, str]:
    """Environment of a process that is to find this package, too."""
    paths = [str(TESTS), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
