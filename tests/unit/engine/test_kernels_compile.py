"""Our kernels compile for GPUs on a machine without one: Triton brings the compilers."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from support import importing_support
from support.compile_child import CASES


@pytest.mark.parametrize(
    "gpus",
    [("90",), pytest.param(("80", "86", "100", "120"), marks=pytest.mark.slow)],
    ids=" ".join,
)
def test_all_kernels_compile_for_gpus(gpus: tuple[str, ...]) -> None:
    child = subprocess.run(
        [sys.executable, "-m", "support.compile_child", *gpus],
        env={**os.environ, **importing_support(), "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    made = [json.loads(line) for line in child.stdout.splitlines()]
    assert len(made) == len(gpus) * sum(len(cases) for cases in CASES.values())
    # Memory of a thread block on the GPUs with the least: 99 KiB at capability 8.6 and 8.9.
    assert [one for one in made if one["shared"] > 99 * 1024] == []
    # Kernels that move nodes must leave registers for many programs at a time.
    moving = [one for one in made if "registers" in one]
    assert {one["kernel"] for one in moving} == {"tree_move._move_cached", "tree_move._move_rows"}
    assert max(one["registers"] for one in moving) <= 64
    assert max(one["spilled"] for one in moving) == 0
    # Keys are loaded while others are weighed.
    attending = [one for one in made if "_attend_" in one["kernel"]]
    assert min(one["on_the_way"] for one in attending) > 0
