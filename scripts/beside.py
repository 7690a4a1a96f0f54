"""Run a command with another vLLM's Python code over the kernels of the installed one.

    scripts/run.sh python scripts/beside.py 0.33.0 pytest tests/engine/test_engine_v2.py --runner v2

For versions without a build for CPUs. A test there checks vLLM's Python and ours, with Triton
kernels in the interpreter. It does not check kernels, graphs, or another torch.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from seams import CACHE, ROOT, fetched


def overlaid(version: str) -> Path:
    """Make a folder with that vLLM's `*.py`, and links to everything else that is installed."""
    folder = fetched(version)
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    installed = Path(spec.origin).parent
    for file in installed.rglob("*"):
        link = folder / "vllm" / file.relative_to(installed)
        if file.is_file() and file.suffix not in (".py", ".pyc") and not link.exists():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file)
    return folder


if __name__ == "__main__":
    version, *command = sys.argv[1:]
    paths = str(overlaid(version)), str(ROOT), os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ["VLLM_CACHE_ROOT"] = str(CACHE / f"compiled-{version}")
    os.execvp(command[0], command)
