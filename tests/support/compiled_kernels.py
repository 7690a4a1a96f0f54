"""What children that compile kernels for GPUs say of them, on a machine without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from support import importing_support

for_gpus = pytest.mark.parametrize(
    "gpus",
    [("90",), pytest.param(("80", "86", "100", "120"), marks=pytest.mark.slow)],
    ids=" ".join,
)
"""Mark of tests with an argument `gpus`: compute capabilities, without the point."""


def told_by(child: str, gpus: Sequence[str]) -> list[dict[str, Any]]:
    """Run a module of `support` for these GPUs. Return the JSON of each line that it prints."""
    process = subprocess.run(
        [sys.executable, "-m", f"support.{child}", *gpus],
        env={**os.environ, **importing_support(), "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return [json.loads(line) for line in process.stdout.splitlines()]
