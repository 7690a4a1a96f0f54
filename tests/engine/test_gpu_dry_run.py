"""The GPU kit without a GPU: all kinds of parts, on an emulated GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support import ROOT

pytestmark = [pytest.mark.engine, pytest.mark.slow]  # ten minutes


def test_a_dry_run(tmp_path: Path) -> None:
    kit = str(ROOT / "benchmarks" / "gpu")
    command = [sys.executable, kit, "--dry-run", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    raw = json.loads((tmp_path / "gpu.json").read_text())
    found = {one["part"]: one for one in raw["outcomes"]}
    assert " passed" in found["load"]["words"]
    checks = found["kernels"]["data"]["checks"]
    assert checks["import vllm_dflash.engine.v2.speculator"] == "ok"
    for kernel, dtype in (
        ("confidence, V = 262144", "float32"),
        ("text look-up, 4 texts of 5,000", "int32"),
        ("decisions, K = 15", "float32"),
        ("drawing, V = 300, W = 7", "float32"),
        ("draft trees, K = 7, N = 15", "float32"),
    ):
        assert checks[f"{kernel}, torch.{dtype}"].startswith("differs by ")
    for name in (
        "text eager",
        "text graphs",
        "adaptive text graphs",
        "trees eager",
        "trees graphs",
    ):
        text = found[name]["data"]
        assert text["verdict"].startswith("lossless, ")
        assert [level["identical"] for level in text["levels"]] == [2]
    soak = found["soak"]["data"]
    assert soak["seen"]["served"] > 0
    assert (soak["differ"], soak["texts"] > 0) == ([], True)
    assert soak["stats"]["runner"] == "v2"
    assert found["parity float32"]["data"]["runner"] == "v2"
    assert found["parity float32"]["data"]["verdict"] == "equal"
    bench = found["tiny"]["data"]
    assert bench["verdict"].startswith("1 rounds; ours / plain ")
    assert {one["side"] for one in bench["measurements"]} == {"plain", "ours"}
    assert all(one["result"]["total_output_tokens"] > 0 for one in bench["measurements"])
    assert any("vllm-dflash" in line and "runner v2" in line for line in bench["log"])
    report = (tmp_path / "gpu.md").read_text()
    assert "### tiny\n\n`vllm-dflash bench --target " in report
    assert "## held_out: tokens/s" in report
