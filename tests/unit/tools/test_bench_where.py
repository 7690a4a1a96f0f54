"""`vllm-dflash bench --where`: parts of steps as tables, from sums made up here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from vllm_dflash.tools.bench.bench_plan import CLOSED, SHORT, Workload
from vllm_dflash.tools.bench.bench_record import Record, describe
from vllm_dflash.tools.bench.bench_report import milliseconds, parts_tables
from vllm_dflash.tools.bench.sides import make_sides
from vllm_dflash.tools.step_times import KINDS, OF_A_KIND

NO_KINDS = {f"{kind}: {what}": 0.0 for kind in KINDS for what in OF_A_KIND}
PLAIN = NO_KINDS | {
    "steps": 10,
    "tokens": 10,
    "seconds": 0.25,
    "target": 0.2,
    "draft": 0.0,
    "drafts": 0,
}
NATIVE = NO_KINDS | {
    "steps": 4,
    "tokens": 8,
    "seconds": 0.2,
    "target": 0.1,
    "draft": 0.06,
    "context": 0.02,
    "drafts": 4,
}
OURS = NATIVE | {"draft": 0.03, "planning": 0.01}


def asked(side: str, setting: int, spent: dict[str, float]) -> dict[str, Any]:
    return {"load": CLOSED, "setting": setting, "side": side, "result": {"spent": spent}}


WHERE = [
    asked(side, setting, spent)
    for setting in (1, 4)
    for side, spent in (("plain", PLAIN), ("native K=3", NATIVE), ("ours", OURS))
]


def test_the_engine_is_what_is_left() -> None:
    assert milliseconds(NATIVE, "steps") == pytest.approx(
        {"target": 25, "draft": 15, "context": 5, "engine": 5}
    )
    assert milliseconds(OURS, "tokens") == pytest.approx(
        {"target": 12.5, "draft": 3.75, "context": 2.5, "planning": 1.25, "engine": 5}
    )


def test_tables() -> None:
    per_step, per_token, kinds = parts_tables(WHERE)
    assert kinds.rows == []
    parts = ["target", "draft", "context", "planning", "engine", "all"]
    assert per_step.columns == ["concurrency", "side", *parts, "tokens per step"]
    assert per_token.columns == per_step.columns
    assert len(per_step.rows) == len(per_token.rows) == 6
    assert per_step.rows[0] == ["1", "plain", "20.00", "0.00", "", "", "5.00", "25.00", "1.00"]
    assert per_token.rows[4] == [
        "4",
        "native K=3",
        "12.50",
        "7.50",
        "2.50",
        "",
        "2.50",
        "25.00",
        "2.00",
    ]
    assert "ms per step, decoding alone" in per_step.title
    assert "ms per output token, decoding alone" in per_token.title


def test_kinds_of_steps() -> None:
    spent = PLAIN | {
        "prompts, drafts: steps": 4,
        "prompts, drafts: seconds": 0.05,
        "prompts, drafts: rows": 400,
        "prompts, drafts: drafts": 10,
        "prompts, drafts: tokens": 6,
        "decoding: steps": 6,
        "decoding: seconds": 0.2,
        "decoding: rows": 6,
        "decoding: tokens": 6,
    }
    _, per_token, kinds = parts_tables([asked("ours", 1, spent) | {"load": SHORT}])
    assert per_token.title == "short: where the time goes, ms per output token"
    assert kinds.rows == [
        ["1", "ours", "decoding", "6", "80%", "1.0", "0.0", "1.0", "33.3", "30.0"],
        ["1", "ours", "prompts, drafts", "4", "20%", "100.0", "2.5", "1.5", "12.5", "120.0"],
    ]


def record_of(where: list[dict[str, Any]]) -> Record:
    workload = Workload((CLOSED,), (1, 4), phases=(), tokens=8, seconds=1.0)
    sides = make_sides("drafter", [3], [])
    record = Record(describe(["bench"], "a pair", {}, workload), sides, rounds=1)
    record.finish_round(
        [
            asked(side.name, setting, {}) | {"result": {"tokens_per_second": 7.0}}
            for side in sides
            for setting in (1, 4)
        ]
    )
    record.where += where
    return record


def test_files(tmp_path: Path) -> None:
    record_of(WHERE).write(tmp_path)
    assert json.loads((tmp_path / "result.json").read_text())["where"] == WHERE
    markdown = (tmp_path / "result.md").read_text()
    assert "| 4 | ours | 12.50 | 3.75 | 2.50 | 1.25 | 5.00 | 25.00 | 2.00 |" in markdown


def test_nothing_of_it_unless_asked_for(tmp_path: Path) -> None:
    record = record_of([])
    record.write(tmp_path)
    assert "where" not in (tmp_path / "result.md").read_text()
    assert len(record.tables) == 2
