"""The commands as users run them: from arguments to JSON, in a pipe, and with Ctrl-C."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import DEMO, ROOT
from support.commands import examples_of
from support.engines import FIXED, TARGET
from support.inspected import check_schema
from vllm_dflash.tools import cli
from vllm_dflash.tools.console import COULD_NOT_RUN
from vllm_dflash.tools.prompts import default_prompts

pytestmark = pytest.mark.engine
PAIR = [str(DEMO / "drafter"), "--target", str(DEMO / "target")]
VERIFIED = ["--target", str(TARGET), "--speculative-config", json.dumps(FIXED)]


def test_inspect_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    """`--help`'s example prints JSON and nothing else, although vLLM logs while it is imported."""
    words = examples_of("inspect", capsys)[1]
    assert "--json" in words
    done = subprocess.run(
        [sys.executable, "-m", "vllm_dflash.tools.cli", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "FORCE_COLOR": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    check_schema(json.loads(done.stdout))


ENGINE_FLAGS = ["--", "--enforce-eager", "--max-model-len", "512", "--port", "8123"]


def test_verify_in_bfloat16(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Flags of `vllm serve` are accepted as well, including those of its server."""
    file = tmp_path / "prompts"
    file.write_text(
        "\n".join(json.dumps({"prompt": one}) for one in default_prompts(str(TARGET))[:8])
    )
    arguments = ["--prompts", str(file), "--concurrency", "1", "4", "--tokens", "32"]
    arguments += ["--dtype", "bfloat16", "--json"]
    assert cli.main(["verify", *VERIFIED, *arguments, *ENGINE_FLAGS]) == 0
    printed, progress = capfd.readouterr()
    assert "DFlash, concurrency 4: 8 texts" in progress
    result = json.loads(printed)
    assert result["verdict"] == "lossless"
    assert (result["tie"], result["dtype"]) == (0.2, "bfloat16")
    assert result["drafter"].startswith("vllm-dflash ")
    assert [level["concurrency"] for level in result["levels"]] == [1, 4]
    assert all(level["acceptance_length"] > 2 for level in result["levels"])


# In either, a server refuses: its config has `require`. Demo's sides are made as those of bench.
@pytest.mark.parametrize("command", [pytest.param("demo", marks=pytest.mark.slow), "verify"])
def test_a_pair_that_would_be_left_to_vllm_is_refused(
    command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """vLLM's own drafts are not shown under our name, and its texts not called lossless."""
    asked = ["--target", PAIR[2], "--drafter", PAIR[0], "--out", str(tmp_path)]
    if command == "verify":
        asked = ["--target", PAIR[2], "--speculative-config"]
        asked.append(json.dumps({"method": "dflash", "model": PAIR[0]}))
    flags = ["--", "--worker-cls", "vllm.v1.worker.cpu_worker.CPUWorker"]
    assert cli.main([command, *asked, *flags]) == COULD_NOT_RUN
    *_, last = capfd.readouterr().err.splitlines()
    assert last.startswith(f"vllm-dflash {command}: vllm-dflash cannot run this engine: worker_cls")
