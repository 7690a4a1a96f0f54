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


def told_of(kernels: Sequence[dict[str, Any]], gpus: Sequence[str]) -> list[dict[str, Any]]:
    """Compile kernels for these GPUs. Return what the child prints of each."""
    process = subprocess.run(
        [sys.executable, "-m", "support.compile_child", *gpus],
        input=json.dumps(kernels),
        env={**os.environ, **importing_support(), "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return [json.loads(line) for line in process.stdout.splitlines()]
