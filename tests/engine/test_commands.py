"""The commands as users run them: from arguments to JSON, in a pipe, and with Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from parity import parity_command
from parity.parity_command import EQUAL
from parity.parity_report import BUILT_IN, stage_names
from support import DEMO, ROOT
from support.commands import examples_of
from support.engines import FIXED, TARGET
from support.inspected import check_schema
from support.waiting import PATIENCE_S, wait_for_end, wait_until
from vllm_dflash.checkpoint.read import read_drafter
from vllm_dflash.tools import cli
from vllm_dflash.tools.console import COULD_NOT_RUN, INTERRUPTED
from vllm_dflash.tools.prompts import default_prompts, read_prompts

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


@pytest.mark.parametrize("command", ["demo", "verify"])
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


def test_parity_of_the_demo_pair(capfd: pytest.CaptureFixture[str]) -> None:
    """stdout is JSON and nothing else; both sides read the drafter with the overrides."""
    overrides = json.dumps({"layer_types": ["sliding_attention"] * 3, "sliding_window": 16})
    options = ["--json", "--tokens", "8", "--drafter-overrides", overrides]
    assert parity_command.main([*PAIR, *options]) == EQUAL
    report = json.loads(capfd.readouterr().out)
    assert (report["verdict"], report["runner"], report["dtype"]) == ("equal", "v1", "float32")
    assert [stage["stage"] for stage in report["stages"]] == stage_names(read_drafter(PAIR[0]))
    assert max(max(stage["end_to_end"], stage["alone"]) for stage in report["stages"]) <= 1e-4
    assert len(report["acceptance"]) == len(read_prompts(BUILT_IN))
    assert all(one["engine"] == one["reference"] != [] for one in report["acceptance"])


def test_interrupting_parity_leaves_no_process(tmp_path: Path) -> None:
    """Ctrl-C while the engine's processes start; vLLM by itself does not survive this."""
    with subprocess.Popen(
        [sys.executable, str(ROOT / "benchmarks" / "parity"), *PAIR],
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Processes that a shell starts in the background ignore interrupts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as command:
        parent = psutil.Process(command.pid)
        wait_until(
            lambda: command.poll() is not None or len(parent.children(recursive=True)) >= 3,
            "the engine's process, and two that vLLM starts",
        )
        assert command.poll() is None, command.communicate()[1]
        started = parent.children(recursive=True)
        os.killpg(command.pid, signal.SIGINT)
        out, err = command.communicate(timeout=PATIENCE_S)
    assert (command.returncode, out) == (INTERRUPTED, ""), err
    assert "Traceback" not in err
    wait_for_end(started)
    assert not list(tmp_path.glob("vllm-dflash-parity-*"))
