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
SHORT = ["--concurrency", "1", "3", "--output-len", "24", "--rounds", "1", "--warmup-rounds", "0"]
FLAGS = ["--dtype", "float32", "--max-num-seqs", "4", "--max-model-len", "512"]
EAGER = ["--", "--enforce-eager", "--kv-cache-memory-bytes", "16000000"]
EAGER += ["--served-model-name", "it", "--tokenizer", str(DEMO / "target")]


def bench(out: Path, *arguments: str) -> dict[tuple[str, int], dict[str, Any]]:
    """Run it, and return what it measured, by side and concurrency."""
    command = ["bench", *TARGET, *arguments, *SHORT, *FLAGS, "--out", str(out), *EAGER]
    assert cli.main(command) == 0
    assert not psutil.Process().children(recursive=True)
    measured = json.loads((out / "result.json").read_text())["measurements"]
    return {(one["side"], one["setting"]): one["result"] for one in measured}


def texts_of(out: Path, side: str) -> list[str]:
    (file,) = (out / "raw").glob(f"*concurrency-3-{side}.json")
    return json.loads(file.read_text())["generated_texts"]


def test_sides_write_the_same_and_draft_as_they_are_told(tmp_path: Path) -> None:
    drafter = ["--drafter", str(DEMO / "drafter"), "--native-k", "3", "--ignore-eos"]
    fixed = '{"draft_length": "fixed"}'
    found = bench(tmp_path, *drafter, "--beside", fixed)
    sides = ["plain", "native K=3", "ours", "ours, draft_length fixed"]
    assert {*found} == {(side, count) for side in sides for count in (1, 3)}
    for (side, count), result in found.items():
        prompts = 4 if count == 1 else 9
        assert (result["completed"], result["failed"]) == (prompts, 0)
        assert result["total_output_tokens"] == 24 * prompts
        assert result["output_throughput"] > 0
        drafts = result.get("spec_decode_draft_tokens", 0)
        if side == "native K=3":
            assert drafts == 3 * result["spec_decode_num_drafts"]
        assert bool(drafts) or side in ("plain", "ours")  # ours may find that drafts do not pay
    texts = [texts_of(tmp_path, side) for side in ("plain", "native-K-3", "ours")]
    assert texts[0] == texts[1] == texts[2]
    assert "vllm-dflash" not in (tmp_path / "logs" / "native-K=3.log").read_text()
    assert "vllm-dflash" in (tmp_path / "logs" / "ours.log").read_text()


def test_each_request_verifies_all_drafts_in_each_step(tmp_path: Path) -> None:
    """A step with other drafts, or in which requests wait, would end it with an error."""
    found = bench(tmp_path, "--break-even", "15", "--context", "100")
    assert {*found} == {(side, count) for side in ("plain", "verify K=15") for count in (1, 3)}
    assert all(result["step_seconds"] > 0 for result in found.values())
    for (side, count), result in found.items():
        steps = 23 * count
        assert result["total_output_tokens"] == steps + count
        if side == "verify K=15":
            assert result["spec_decode_accepted_tokens"] == 0
            assert 14 * steps < result["spec_decode_draft_tokens"] <= 15 * (steps + count)
