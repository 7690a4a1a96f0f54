"""Run a part, end it when its time is over, and record its outcome."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from gpu.gpu_machine import ROOT, kind_of, version_of
from gpu.gpu_plan import RESULT, Part
from vllm_dflash.tools.console import INTERRUPTED
from vllm_dflash.tools.progress import Tell
from vllm_dflash.tools.server import LAST_LINES

PASSED, FAILED, SKIPPED, REFUSED = "passed", "failed", "skipped", "refused by vLLM"
UNFINISHED = "broken off"
"""Outcome of a part that did not come to its end, say because the machine was taken away."""
SECONDS_TO_END = 20.0
"""Time to end, for a part whose time is over or that is interrupted."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a part."""

    part: str
    command: list[str]
    """The command, the same wherever the repository and Python are."""
    machine: Mapping[str, str]
    outcome: str
    words: str
    seconds: float
    tail: list[str]
    """End of its log, if it failed."""
    data: dict[str, Any]
    """Its own result."""
    when: str = ""
    """Start time, UTC."""


def kept(part: Part, out: Path, machine: Mapping[str, str]) -> Outcome | None:
    """Return the outcome of an earlier run if it is still good: it did not fail, and machine,
    sources and command were the same."""
    found = _read(_outcome_file(part, out))
    if found is None or found.outcome not in (PASSED, REFUSED):
        return None
    same = found.command == _words(part) and kind_of(found.machine) == kind_of(machine)
    return found if same else None


def read_outcomes(out: Path) -> list[Outcome]:
    """Read all outcomes, of any machine, the earliest first."""
    found = (_read(file) for file in (out / "parts").glob("*.json"))
    return sorted((one for one in found if one), key=lambda one: (one.when, one.part))


def run(
    part: Part,
    out: Path,
    machine: Mapping[str, str],
    environment: Mapping[str, str],
    tell: Tell = lambda done, doing="": None,
    seconds: float | None = None,
) -> Outcome:
    """Run it for `seconds` (default: its limit), and keep its outcome.

    Its results are saved repeatedly while it runs.
    """
    limit = part.limit if seconds is None else seconds
    result, log = (out / folder / f"{part.slug}.{folder}" for folder in ("json", "log"))
    for file in (result, log, _outcome_file(part, out)):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
    when = datetime.now(UTC).isoformat(timespec="milliseconds")
    found = Outcome(part.name, _words(part), machine, UNFINISHED, "", 0.0, [], {}, when)
    if absent := [name for name in part.needs if not version_of(name)]:
        return _keep(part, out, replace(found, outcome=SKIPPED, words=f"no {', '.join(absent)}"))

    def news(passed: float) -> None:
        _keep(part, out, replace(found, words=last_line(log), seconds=passed, data=_data(result)))

    started = time.monotonic()
    code = _execute(part, limit, result, log, environment, tell, news)
    passed = time.monotonic() - started
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    outcome, words = judge(code, lines, data := _data(result))
    if code is None:
        words = f"ended after {passed:.0f} s, its limit; {words}"
    tail = lines[-LAST_LINES:] if outcome == FAILED else []
    ended = replace(found, outcome=outcome, words=words, seconds=passed, tail=tail, data=data)
    return _keep(part, out, ended)


def _keep(part: Part, out: Path, outcome: Outcome) -> Outcome:
    _outcome_file(part, out).write_text(json.dumps(asdict(outcome), indent=1))
    return outcome


def _read(file: Path) -> Outcome | None:
    try:
        return Outcome(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _data(result: Path) -> dict[str, Any]:
    try:
        return json.loads(result.read_text())
    except (OSError, ValueError):
        return {}


def _words(part: Part) -> list[str]:
    places = {sys.executable: "python", str(ROOT): "."}
    words = [*part.command]
    for place, name in places.items():
        words = [word.replace(place, name) for word in words]
    return words


def judge(code: int | None, lines: list[str], data: Mapping[str, Any]) -> tuple[str, str]:
    """Judge by exit code (None: it was ended), log and result. Returns outcome and a few words."""
    words = data.get("verdict") or (lines[-1].strip("= ") if lines else "no word")
    if code in (INTERRUPTED, -signal.SIGINT):
        return UNFINISHED, words
    if code != 0:
        return FAILED, words
    if "refused" in data:
        return REFUSED, data["refused"]
    if not data and " passed" not in words:  # pytest skipped all, and says why
        reasons = {line.rpartition(": ")[2] for line in lines if line.startswith("SKIPPED")}
        return SKIPPED, ": ".join([words, *sorted(reasons)])
    return PASSED, words


def _outcome_file(part: Part, out: Path) -> Path:
    return out / "parts" / f"{part.slug}.json"


def _execute(
    part: Part,
    limit: float,
    result: Path,
    log: Path,
    environment: Mapping[str, str],
    tell: Tell,
    news: Callable[[float], None],
) -> int | None:
    """Return the exit code; None: it was ended. `news` gets the seconds at each new result."""
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
    changed = None
    try:
        while (seconds := time.monotonic() - started) < limit:
            tell(seconds, last_line(log))
            if (written := result.stat().st_mtime_ns) != changed:
                changed = written
                news(seconds)
            with suppress(psutil.TimeoutExpired, subprocess.TimeoutExpired):
                return process.wait(1)
        return None
    finally:
        _end(process)


def _end(process: psutil.Process) -> None:
    """Send Ctrl-C, then kill what is left, including engines in sessions of their own."""
    if process.poll() is None:
        family = [process, *process.children(recursive=True)]
        process.send_signal(signal.SIGINT)
        _, left = psutil.wait_procs(family, timeout=SECONDS_TO_END)
        for one in left:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(left, timeout=SECONDS_TO_END)


def last_line(log: Path) -> str:
    """Return the last line that a part printed, to show progress."""
    lines = log.read_text(errors="replace").splitlines()[-3:]
    return next((line[:60] for line in reversed(lines) if line.strip()), "")
