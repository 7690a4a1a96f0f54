"""Run a part, end it when its time is over, and say what came of it."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from gpu.gpu_machine import ROOT
from gpu.gpu_plan import LIMIT, RESULT, Part
from vllm_dflash.tools.engine_log import LAST_LINES
from vllm_dflash.tools.progress import Tell

PASSED, FAILED, SKIPPED, REFUSED = "passed", "failed", "skipped", "refused by vLLM"
SECONDS_TO_END = 20.0
"""For a part whose time is over, or that is interrupted."""


@dataclass(frozen=True)
class Outcome:
    """What came of a part."""

    part: str
    command: list[str]
    machine: Mapping[str, str]
    outcome: str
    words: str
    seconds: float
    tail: list[str]
    """Of its log, where it failed."""
    data: dict[str, Any]
    """Its own result."""


def kept(part: Part, out: Path, machine: Mapping[str, str]) -> Outcome | None:
    """What came of it before: of the same command on the same machine, unless it failed."""
    try:
        found = Outcome(**json.loads(_outcome_file(part, out).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    same = found.command == [*part.command] and found.machine == machine
    return found if same and found.outcome != FAILED else None


def run(
    part: Part,
    out: Path,
    machine: Mapping[str, str],
    environment: Mapping[str, str],
    tell: Tell = lambda done, doing="": None,
) -> Outcome:
    """Run it and keep what came of it."""
    result, log = (out / folder / f"{part.slug}.{folder}" for folder in ("json", "log"))
    for file in (result, log, _outcome_file(part, out)):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
    started = time.monotonic()
    code = _execute(part, result, log, environment, tell)
    seconds = time.monotonic() - started
    try:
        data = json.loads(result.read_text())
    except (OSError, ValueError):
        data = {}
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    outcome, words = judge(code, lines, data)
    if code is None:
        words = f"ended after {seconds:.0f} s, its limit; {words}"
    tail = lines[-LAST_LINES:] if outcome == FAILED else []
    found = Outcome(part.name, [*part.command], machine, outcome, words, seconds, tail, data)
    _outcome_file(part, out).write_text(json.dumps(asdict(found), indent=1))
    return found


def judge(code: int | None, lines: list[str], data: Mapping[str, Any]) -> tuple[str, str]:
    """The outcome by exit code (None: it was ended), log and result; and a few words about it."""
    words = data.get("verdict") or (lines[-1].strip("= ") if lines else "no word")
    if code != 0:
        return FAILED, words
    if "refused" in data:
        return REFUSED, data["refused"]
    if not data and " passed" not in words:  # pytest's, which says why
        reasons = {line.rpartition(": ")[2] for line in lines if line.startswith("SKIPPED")}
        return SKIPPED, ": ".join([words, *sorted(reasons)])
    return PASSED, words


def _outcome_file(part: Part, out: Path) -> Path:
    return out / "parts" / f"{part.slug}.json"


def _execute(
    part: Part, result: Path, log: Path, environment: Mapping[str, str], tell: Tell
) -> int | None:
    """Its exit code; None: it was ended."""
    command = [str(result) if word == RESULT else word for word in part.command]
    with log.open("w") as told, result.open("w") as printed:
        process = psutil.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=printed if "--json" in command else told,
            stderr=told,
            # A Ctrl-C at the terminal is for the kit, which then ends the part itself.
            start_new_session=True,
        )
    started = time.monotonic()
    try:
        while (seconds := time.monotonic() - started) < LIMIT * part.seconds:
            tell(seconds, _last_line(log))
            with suppress(psutil.TimeoutExpired):
                return process.wait(1)
        return None
    finally:
        _end(process)


def _end(process: psutil.Popen) -> None:
    """Ctrl-C; whoever is left after that is killed, engines in sessions of their own included."""
    if process.poll() is None:
        family = [process, *process.children(recursive=True)]
        process.send_signal(signal.SIGINT)
        _, left = psutil.wait_procs(family, timeout=SECONDS_TO_END)
        for one in left:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(left, timeout=SECONDS_TO_END)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-3:]
    return next((line[:60] for line in reversed(lines) if line.strip()), "")
