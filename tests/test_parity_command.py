"""What `vllm-dflash parity` returns and prints, and that an interrupted one leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from vllm_dflash import cli
from vllm_dflash.parity import check
from vllm_dflash.parity.command import COULD_NOT_RUN, DIFFERS, EQUAL, INTERRUPTED
from vllm_dflash.parity.compare import Acceptance
from vllm_dflash.parity.report import ParityReport
from vllm_dflash.parity.stages import Place, Stage

DEMO = Path(__file__).parent.parent / "models" / "demo"
PAIR = [str(DEMO / "drafter"), "--target", str(DEMO / "target")]


def report(*stages: Stage, culprit: str | None = None, **changes: Any) -> ParityReport:
    fields: dict[str, Any] = {
        "drafter": "d",
        "target": "t",
        "runner": "v1",
        "dtype": "float32",
        "tolerance": 1e-4,
        "stages": stages,
        "acceptance": (Acceptance([3, 1], [3, 2]),),
        "nan_drafts": 0,
        "culprit": culprit,
        "cause": culprit and f"something about {culprit}",
    }
    return ParityReport(**fields | changes)


CLEAN = report(Stage("tap of layer 1", 2e-6, 1e-6, Place(0, 0)))
FAULTY = report(
    Stage("tap of layer 1", 1e-6, 1e-6, Place(0, 0)),
    Stage("embedding", 0.5, 0.5, Place(1, 2)),
    Stage("layer 0", float("inf"), 1e-6, Place(0, 0), non_finite=7),
    culprit="embedding",
)


def answers(monkeypatch: pytest.MonkeyPatch, outcome: ParityReport | BaseException) -> None:
    def check_parity(*args: Any, **kwargs: Any) -> ParityReport:
        print("noise of an engine")
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    monkeypatch.setattr(check, "check_parity", check_parity)


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (CLEAN, EQUAL),
        (FAULTY, DIFFERS),
        (report(nan_drafts=1), DIFFERS),
        (ValueError("the pair does not fit"), COULD_NOT_RUN),
        (KeyError("a bug"), COULD_NOT_RUN),
        (KeyboardInterrupt(), INTERRUPTED),
    ],
    ids=str,
)
def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    outcome: ParityReport | BaseException,
    code: int,
) -> None:
    answers(monkeypatch, outcome)
    assert cli.main(["parity", *PAIR]) == code
    out, err = capfd.readouterr()
    assert "noise" not in out
    if isinstance(outcome, Exception):
        assert not out
        assert str(outcome.args[0]) in err


def test_json_names_the_culprit(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    answers(monkeypatch, FAULTY)
    cli.main(["parity", *PAIR, "--json"])
    written = json.loads(capfd.readouterr().out)
    assert written == {
        "drafter": "d",
        "target": "t",
        "runner": "v1",
        "dtype": "float32",
        "tolerance": 1e-4,
        "verdict": "differs",
        "culprit": "embedding",
        "cause": "something about embedding",
        "stages": [
            row("tap of layer 1", 1e-6, 1e-6),
            row("embedding", 0.5, 0.5, prompt=1, step=2),
            row("layer 0", None, 1e-6, non_finite=7),
        ],
        "acceptance": [{"engine": [3, 1], "reference": [3, 2]}],
        "nan_drafts": 0,
        "non_finite": 7,
    }


def row(name: str, end_to_end: float | None, alone: float, **more: int) -> dict[str, Any]:
    errors = {"stage": name, "end_to_end": end_to_end, "alone": alone}
    return {**errors, "prompt": 0, "step": 0, "non_finite": 0, **more}


def test_tables_mark_the_first_difference(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    answers(monkeypatch, FAULTY)
    cli.main(["parity", *PAIR])
    out = capfd.readouterr().out
    (marked,) = (line for line in out.splitlines() if "first difference" in line)
    assert "embedding" in marked
    assert "worst at prompt 2, step 3" in marked
    assert "Differs from embedding on: something about embedding." in out
    answers(monkeypatch, CLEAN)
    cli.main(["parity", *PAIR])
    out = capfd.readouterr().out
    assert "Equal" in out
    assert "first difference" not in out
    assert "Acceptance differs only where" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere/drafter", "--target", str(DEMO / "target")], "nowhere/drafter"),
        ([str(DEMO / "drafter"), "--target", "./nowhere"], "nowhere"),
        ([*PAIR, "--prompts", "nothing.jsonl"], "pass another --prompts"),
        ([*PAIR, "--max-model-len", "60", "--tokens", "50"], "--max-model-len"),
    ],
)
def test_refused_before_an_engine_starts(
    capfd: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert cli.main(["parity", *arguments]) == COULD_NOT_RUN
    out, err = capfd.readouterr()
    assert not out
    assert message in err


def processes_of(session: int) -> list[str]:
    """Command lines of the living processes of a session."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, *fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == session and state != "Z":
                found.append((folder / "cmdline").read_text())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def wait_for(is_true: Any, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if is_true():
            return True
        time.sleep(0.1)
    return False


@pytest.mark.engine
def test_interrupting_leaves_no_process(tmp_path: Path) -> None:
    """Ctrl-C while the engine's processes start: a terminal sends it to all of them."""
    command = subprocess.Popen(
        [sys.executable, "-m", "vllm_dflash.cli", "parity", *PAIR, "--tokens", "1000"],
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Processes that a shell starts in the background ignore interrupts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert wait_for(lambda: len(processes_of(command.pid)) >= 3, 120)
        os.killpg(command.pid, signal.SIGINT)
        out, err = command.communicate(timeout=60)
        assert (command.returncode, out) == (INTERRUPTED, ""), err
        assert wait_for(lambda: not processes_of(command.pid), 10), processes_of(command.pid)
    finally:
        if processes_of(command.pid):
            os.killpg(command.pid, signal.SIGKILL)
    assert not list(tmp_path.glob("vllm-dflash-parity-*"))
