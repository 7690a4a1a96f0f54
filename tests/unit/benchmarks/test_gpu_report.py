"""The GPU kit from parts that are made up here to its report."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import pytest

from gpu import gpu_command, gpu_measure, gpu_run
from gpu.gpu_plan import Part
from gpu.gpu_report import COUNTERS, write_report
from gpu.gpu_run import FAILED, PASSED, Outcome
from gpu.gpu_sizes import ADAPTIVE, TINY, side_of
from vllm_dflash.tools.bench.sides import OURS, PLAIN
from vllm_dflash.tools.console import INTERRUPTED

MACHINE = {"name": "GPU of | tests", "driver_version": "1"}
REAL, STRETCHED = "8B, contexts up to 2k", "8B, contexts of 32k"


def benched(side: str, rates: dict[tuple[str, int], float], **more: Any) -> dict[str, Any]:
    """What `gpu_measure` leaves: rates by load and setting."""
    measurements = [
        {"load": load, "setting": setting, "side": side, "is_real": load == REAL, "result": result}
        for (load, setting), rate in rates.items()
        for result in [{"tokens_per_second": rate, "tokens_per_output": 2.0}] * 2
    ]
    data = {"verdict": f"{len(rates)} settings", "side": asdict(side_of(side, "d"))}
    return data | {"measurements": measurements, "gpu_memory_mib": "7"} | more


def outcome(name: str, data: dict[str, Any], **more: Any) -> Outcome:
    fields: dict[str, Any] = {"outcome": PASSED, "words": "fine", "seconds": 3.0, "tail": []}
    return Outcome(name, [], MACHINE, data=data, **fields | more)


def report(folder: Path, outcomes: Sequence[Outcome], *more: str) -> str:
    parts = [Part(name, 60.0, ()) for name in [*(one.part for one in outcomes), *more]]
    write_report(parts, outcomes, [], folder)
    return (folder / "gpu.md").read_text()


ALL = {(REAL, 1): 100.0, (REAL, 4): 400.0, (STRETCHED, 2): 50.0}


def test_what_the_report_says(tmp_path: Path) -> None:
    stats = dict.fromkeys(COUNTERS, 0.5)
    log = ["draft lengths 0, 7 (a | b)"]
    outcomes = [
        outcome("tests", {}, outcome=FAILED, words="1 failed", tail=["E  because"]),
        outcome("8B plain", benched("plain", ALL, log=["Using X backend"])),
        outcome("8B native K=7", benched("native K=7", {key: 2 * ALL[key] for key in ALL})),
        outcome("8B adaptive", benched(ADAPTIVE, {(REAL, 1): 1.0})),
        outcome(
            "8B ours", benched("ours", {key: 3 * ALL[key] for key in ALL}, log=log, stats=stats)
        ),
    ]
    text = report(tmp_path, outcomes, "parity")
    assert "| name | GPU of / tests |" in text
    assert "|  | tests | 60 | 3 | failed | 1 failed |" in text
    assert "|  | parity | 60 | - | not run |  |" in text
    assert "### tests failed\n\n```\nE  because\n```" in text
    assert "| 8B ours | 7 | draft lengths 0, 7 (a / b); drafted steps 0.5; " in text
    assert "| 8B plain | 7 | Using X backend |" in text
    # Of what is real: tokens/s, ratios, and steps; one side has not all of it, so it is nowhere.
    assert f"## {REAL}: tokens/s, median" in text
    assert "| concurrency | plain | native K=7 | ours |" in text
    assert "3.00 (3.00 - 3.00)" in text
    assert "| 4 | 2.00, 20.00 | 2.00, 10.00 | 2.00, 6.67 |" in text
    # Of the others steps alone.
    assert f"## {STRETCHED}: tokens of a request a step" in text
    assert f"## {STRETCHED}: tokens/s" not in text
    assert "8B: plain, native K=7, native adaptive, ours\n  - contexts up to 0.4k: 1, 8," in text
    assert "acceptance is\nnot**" in text
    assert (tmp_path / "gpu.png").stat().st_size > 5000
    raw = json.loads((tmp_path / "gpu.json").read_text())
    assert raw["machine"] == MACHINE
    assert [one["part"] for one in raw["outcomes"]] == [one.part for one in outcomes]


def test_without_plain_decoding_there_is_nothing_to_compare(tmp_path: Path) -> None:
    (tmp_path / "gpu.png").write_text("of a run before")
    text = report(tmp_path, [outcome("8B ours", benched("ours", ALL))])
    assert "| 4 | 400.0 |" in text
    assert "tokens/s of ours" not in text
    assert not (tmp_path / "gpu.png").exists()
    assert "gpu.png" not in text


def test_without_ours_plain_and_native_are_shown(tmp_path: Path) -> None:
    text = report(
        tmp_path, [outcome(f"8B {side}", benched(side, ALL)) for side in ("plain", "native K=7")]
    )
    assert f"## {REAL}: tokens/s, median" in text
    assert "tokens/s of ours" not in text


def run_all(
    parts: Sequence[Part],
    folder: Path,
    *,
    whole: Sequence[Part] = (),
    machine: Mapping[str, str] = MACHINE,
    again: bool = False,
    within: float | None = None,
    at_once: int = 1,
) -> int:
    docs = folder / "docs"
    options = argparse.Namespace(
        again=again, dry_run=False, docs=docs, within=within, at_once=at_once
    )
    return gpu_command.run_all(parts, whole or parts, folder / "out", machine, options)


def counting(folder: Path) -> Part:
    code = f"open({str(folder / 'count')!r}, 'a').write('x'); print('1 passed')"
    return Part("counting", 60.0, (sys.executable, "-c", code))


def test_a_failing_part_does_not_end_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bad = Part("bad", 60.0, (sys.executable, "-c", "1 / 0"))
    assert run_all([bad, counting(tmp_path)], tmp_path) == 1
    printed, progress = capfd.readouterr()
    assert "1 of 2, bad: failed: ZeroDivisionError: division by zero" in progress
    assert "2 of 2, counting: passed: 1 passed" in progress
    assert "gpu.md" in printed
    text = (tmp_path / "docs" / "gpu.md").read_text()
    assert "### bad failed" in text
    assert "ZeroDivisionError: division by zero\n```" in text


def test_parts_run_at_the_same_time(tmp_path: Path) -> None:
    """Each waits for the other's word, so that neither can end alone."""
    wait = f"""
import sys, time
from pathlib import Path
mine, other = (Path({str(tmp_path)!r}, name) for name in sys.argv[1:])
mine.touch()
while not other.exists():
    time.sleep(0.01)
print("1 passed")
"""
    names = [("a", "b"), ("b", "a")]
    parts = [Part(one[0], 60.0, (sys.executable, "-c", wait, *one)) for one in names]
    assert run_all(parts, tmp_path, at_once=2) == 0


def test_a_run_goes_on_where_it_was_broken_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What failed is run again, what did not is not, unless it is asked for."""
    fails_once = f"""
from pathlib import Path
again = Path({str(tmp_path / "again")!r})
assert again.exists() or again.touch()
print('1 passed')
"""
    parts = [counting(tmp_path), Part("flaky", 60.0, (sys.executable, "-c", fails_once))]
    assert [run_all(parts, tmp_path) for _ in range(3)] == [1, 0, 0]
    assert (tmp_path / "count").read_text() == "x"
    assert run_all(parts, tmp_path, again=True) == 0
    assert (tmp_path / "count").read_text() == "xx"


def test_an_interrupted_run_reports_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = gpu_run.run

    def run(part: Part, *arguments: Any) -> Outcome:
        if part.name == "last":
            raise KeyboardInterrupt
        return really(part, *arguments)

    monkeypatch.setattr(gpu_command, "run", run)
    assert run_all([counting(tmp_path), Part("last", 60.0, ())], tmp_path) == INTERRUPTED
    text = (tmp_path / "docs" / "gpu.md").read_text()
    assert "passed | 1 passed |" in text
    assert "|  | last | 60 | - | not run |  |" in text


def test_runs_of_some_parts_become_one_report(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Combine results of the same kind of machine and the same sources; what is of others is
    named."""
    parts = [counting(tmp_path), Part("other", 60.0, (sys.executable, "-c", "print('2 passed')"))]
    newer = MACHINE | {"driver_version": "2"}
    assert run_all(parts[:1], tmp_path, whole=parts) == 0
    assert run_all(parts[1:], tmp_path, whole=parts, machine=newer) == 0
    text = (tmp_path / "docs" / "gpu.md").read_text()
    assert "| driver_version | 1, 2 |" in text
    assert "passed | 1 passed |" in text
    assert "passed | 2 passed |" in text
    assert "Not told here" not in text
    changed = newer | {"sources": "new"}
    assert run_all(parts[1:], tmp_path, whole=parts, machine=changed) == 0
    text = (tmp_path / "docs" / "gpu.md").read_text()
    assert "|  | counting | 60 | - | not run |  |" in text
    assert "passed | 2 passed |" in text
    assert "| counting | passed | GPU of / tests | ? | ? | ? |" in text


def test_a_report_alone_of_what_was_brought_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, docs = tmp_path / "out", tmp_path / "docs"
    told = ["--report", "--out", str(out), "--docs", str(docs)]
    assert gpu_command.main(told) == gpu_command.LACKING
    run_all([counting(tmp_path)], tmp_path, machine=MACHINE | {"sources": "elsewhere"})
    assert gpu_command.main(told) == 0
    assert "These outcomes are of other sources" in capsys.readouterr().out
    raw = json.loads((docs / "gpu.json").read_text())
    assert raw["machine"]["sources"] == "elsewhere"
    assert [one["part"] for one in raw["outcomes"]] == ["counting"]


def test_what_cannot_end_in_time_is_not_begun(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_all([counting(tmp_path)], tmp_path, within=20.0) == 0
    assert not (tmp_path / "count").exists()
    assert "1 of 1, counting: not begun, 20 s are left" in capfd.readouterr().err
    stuck = Part("stuck", 4.0, (sys.executable, "-c", "import time; time.sleep(600)"))
    assert run_all([stuck], tmp_path, within=3.0) == 1
    text = (tmp_path / "docs" / "gpu.md").read_text()
    told = re.search(r"failed \| ended after (\d+) s", text)
    assert told is not None
    assert 3 <= int(told[1]) < 60  # a process is not ended at once on a busy machine


def test_without_matplotlib_there_is_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu.gpu_report.version_of", lambda package: "")
    sides = ("plain", "native K=7")
    text = report(tmp_path, [outcome(f"8B {side}", benched(side, ALL)) for side in sides])
    assert "gpu.png" not in text
    assert f"## {REAL}: tokens/s, median" in text


def test_texts_are_told_beside_what_a_cpu_accepts(tmp_path: Path) -> None:
    level = {"concurrency": 8, "texts": 24, "identical": 23, "ties": 1, "regressions": 0}
    level["acceptance_length"] = 2.784  # type: ignore[assignment]
    data = {"levels": [level], "on a CPU": 2.79, "log": ["Using X backend"]}
    text = report(tmp_path, [outcome("text eager X", data)])
    assert "| text eager X | 8 | 24 | 23 | 1 | 0 | 2.78 | 2.79 |" in text
    assert "| text eager X |  | Using X backend |" in text


class MadeUp:
    """An engine process without an engine, that leaves a log."""

    def __init__(self, log: Path, **arguments: Any) -> None:
        log.parent.mkdir(exist_ok=True)
        log.write_text(f"INFO [x.py:1] Using {arguments['environment']['VLLM_PLUGINS']}X backend")
        assert arguments["max_model_len"] == 72
        self.answers = self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def facts(self) -> dict[str, Any]:
        return {}

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [[1]] * len(texts)

    def closed(self, **load: Any) -> dict[str, Any]:
        assert [len(prompt) for prompt in load["prompts"]] == [48, 48]
        return {"tokens_per_second": 10.0, "tokens_per_output": 1.0}

    def dflash_stats(self) -> list[dict[str, Any]]:
        return [dict.fromkeys(COUNTERS, 0.25)]


def test_from_an_engine_to_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_measure, "EngineProcess", MadeUp)
    outcomes = []
    for side in (PLAIN, OURS):
        file = tmp_path / "json" / f"{side}.json"
        file.parent.mkdir(exist_ok=True)
        assert gpu_measure.measure(TINY, side, 60.0, 1.0, file) == 0
        outcomes.append(outcome(f"tiny {side}", json.loads(file.read_text())))
    text = report(tmp_path, outcomes)
    assert "| tiny plain |  | Using X backend |" in text
    assert "| tiny ours |  | Using dflashX backend; drafted steps 0.25; " in text
    assert "| 2 | 10.0 | 10.0 |" in text
    assert "| 2 | 1.00 (1.00 - 1.00) |" in text
    assert "| 2 | 1.00, 200.00 | 1.00, 200.00 |" in text
