"""`vllm-dflash bench` with real servers, as short as possible: what is measured is checked, not how
fast it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("matplotlib")

from support import DEMO
from vllm_dflash.tools import cli

TARGET = ["--target", str(DEMO / "target")]
SHORT = ["--concurrency", "3", "--output-len", "24", "--rounds", "1", "--warmup-rounds", "0"]
FLAGS = ["--dtype", "float32", "--max-num-seqs", "4", "--max-model-len", "512"]
EAGER = ["--", "--enforce-eager", "--kv-cache-memory-bytes", "16000000"]
EAGER += ["--served-model-name", "it", "--tokenizer", str(DEMO / "target")]


def bench(out: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    """Run it, and return what it measured, by side."""
    command = ["bench", *TARGET, *arguments, *SHORT, *FLAGS, "--out", str(out), *EAGER]
    assert cli.main(command) == 0
    assert not psutil.Process().children(recursive=True)
    measured = json.loads((out / "result.json").read_text())["measurements"]
    return {one["side"]: one["result"] for one in measured}


def texts_of(out: Path, side: str) -> list[str]:
    (file,) = (out / "raw").glob(f"*concurrency-3-{side}.json")
    return json.loads(file.read_text())["generated_texts"]


def test_sides_write_the_same(tmp_path: Path) -> None:
    drafter = ["--drafter", str(DEMO / "drafter"), "--native-k", "3", "--ignore-eos"]
    found = bench(tmp_path, *drafter)
    assert {*found} == {"plain", "native K=3", "ours"}
    for result in found.values():
        assert (result["completed"], result["failed"]) == (9, 0)
        assert result["total_output_tokens"] == 24 * 9
        assert result["output_throughput"] > 0
    native = found["native K=3"]
    assert native["spec_decode_draft_tokens"] == 3 * native["spec_decode_num_drafts"] > 0
    texts = [texts_of(tmp_path, side) for side in ("plain", "native-K-3", "ours")]
    assert texts[0] == texts[1] == texts[2]
    assert "vllm-dflash" not in (tmp_path / "logs" / "native-K=3.log").read_text()
    assert "vllm-dflash" in (tmp_path / "logs" / "ours.log").read_text()


def test_each_request_verifies_all_drafts_in_each_step(tmp_path: Path) -> None:
    """A step with other drafts, or in which requests wait, would end it with an error."""
    found = bench(tmp_path, "--break-even", "15", "--context", "100")
    assert {*found} == {"plain", "verify K=15"}
    for result in found.values():
        assert result["step_seconds"] > 0
        assert result["total_output_tokens"] == 3 * 24
    verifying = found["verify K=15"]
    assert verifying["spec_decode_accepted_tokens"] == 0
    assert 14 * 3 * 23 < verifying["spec_decode_draft_tokens"] <= 15 * 3 * 24
