"""Numbers and files of `vllm-dflash bench`, from measurements made up here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from vllm_dflash.tools.bench import bench_report as report
from vllm_dflash.tools.bench.bench_plan import CLOSED, Workload
from vllm_dflash.tools.bench.bench_record import Record, describe
from vllm_dflash.tools.bench.bench_report import Results
from vllm_dflash.tools.bench.sides import Side, make_sides
from vllm_dflash.tools.tables import Table

SIDES = make_sides("drafter", native_k=[3, 7])
WORKLOAD = Workload((CLOSED,), (1, 4), tokens=8, seconds=1.0)
CLOSED_ROUNDS = {
    # tokens/s by concurrency and side, one per round
    1: {
        "plain": [100, 100, 200],
        "native K=3": [150, 160, 170],
        "native K=7": [200, 180, 100],
        "ours": [300, 200, 200],
    },
    4: {
        "plain": [400, 400, 400],
        "native K=3": [300, 300, 300],
        "native K=7": [100, 100, 100],
        "ours": [400, 440, 480],
    },
}


def measurement(
    load: str, setting: float | None, side: str, round_number: int, result: dict[str, Any]
) -> dict[str, Any]:
    return {
        "round": round_number,
        "load": load,
        "setting": setting,
        "side": side,
        "result": result,
        "stats": None,
    }


def closed() -> list[dict[str, Any]]:
    return [
        measurement(CLOSED, setting, side, number, {"tokens_per_second": value})
        for setting, by_side in CLOSED_ROUNDS.items()
        for side, values in by_side.items()
        for number, value in enumerate(values)
    ]


def rows_by_name(table: Table) -> dict[str, Sequence[str]]:
    return {row[0]: row[1:] for row in table.rows}


def test_ratios_are_taken_within_a_round() -> None:
    table = report.comparison_table(Results(SIDES, closed()), CLOSED)
    rows = rows_by_name(table)
    # The ratio of the medians of ours and native K=7 is 1.11.
    assert rows["1"] == [
        "2.00 (1.00 - 3.00)",
        "1.50 (1.11 - 2.00), K=7",
        "1.50 (1.11 - 2.00), K=7",
        "1.50 (1.11 - 2.00)",
    ]
    assert rows["4"] == [
        "1.10 (1.00 - 1.20)",
        "1.47 (1.33 - 1.60), K=3",
        "1.10 (1.00 - 1.20), plain",
        "4.40 (4.00 - 4.80)",
    ]


def test_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    command = ["vllm-dflash", "bench", "--quick"]
    record = Record(describe(command, "a pair", {}, WORKLOAD), SIDES, rounds=9)
    record.finish_round(closed())
    record.write(tmp_path)
    saved = json.loads((tmp_path / "result.json").read_text())
    assert saved["schema"] == "vllm-dflash.bench/2"
    assert saved["rounds_complete"] == 1
    assert saved["measurements"] == record.measurements
    assert [Side(**side) for side in saved["sides"]] == SIDES
    assert saved["about"]["workload"]["tokens"] == 8
    assert saved["about"]["command"] == "vllm-dflash bench --quick"
    markdown = (tmp_path / "result.md").read_text()
    assert "1 of 9 rounds are complete." in markdown
    assert "a pair" in markdown
    assert (tmp_path / "result.png").read_bytes().startswith(b"\x89PNG")
    assert {file.name for file in tmp_path.iterdir()} == {"result.json", "result.md", "result.png"}
