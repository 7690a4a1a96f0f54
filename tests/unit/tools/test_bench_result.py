"""Numbers and files of `vllm-dflash bench`, from results made up here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from vllm_dflash.tools.bench.bench_result import (
    Record,
    Results,
    holds_all,
    throughput_table,
    waits_table,
)
from vllm_dflash.tools.bench.bench_runs import Cell
from vllm_dflash.tools.bench.bench_setup import describe
from vllm_dflash.tools.bench.sides import Side, make_sides
from vllm_dflash.tools.tables import Table

SIDES = make_sides("drafter", native_k=[3, 7], beside=["blocks"])
ROUNDS = {
    # tokens/s by concurrency and side, one per round
    1: {
        "plain": [100, 100, 200],
        "native K=3": [150, 160, 170],
        "native K=7": [200, 180, 100],
        "ours": [300, 200, 200],
        "ours, blocks only": [900, 900, 900],
    },
    4: {
        "plain": [400, 400, 400],
        "native K=3": [300, 300, 300],
        "native K=7": [100, 100, 100],
        "ours": [400, 440, 480],
        "ours, blocks only": [1, 1, 1],
    },
}


def measurements() -> list[dict[str, Any]]:
    waits = {"median_ttft_ms": 50.04, "p99_ttft_ms": 80, "median_tpot_ms": 5, "p99_tpot_ms": 6}
    drafts = {"ours": {"spec_decode_acceptance_length": 2.345}}
    return [
        {
            "round": number,
            "load": "code",
            "setting": setting,
            "side": side,
            "result": {"output_throughput": value, **waits, **drafts.get(side, {})},
        }
        for setting, by_side in ROUNDS.items()
        for side, values in by_side.items()
        for number, value in enumerate(values)
    ]


def rows_by_name(table: Table) -> dict[str, Sequence[str]]:
    return {row[0]: row[1:] for row in table.rows}


def test_ratios_are_taken_within_a_round() -> None:
    """The fastest other is the one with the best median, and none of ours."""
    table = throughput_table(Results(SIDES, measurements()), "code")
    rows = rows_by_name(table)
    # The ratio of the medians of ours and native K=7 is 1.11.
    best = "1.50 (1.11 - 2.00), native K=7"
    assert rows["1"] == ["100.0", "160.0", "180.0", "200.0", "900.0", "2.00 (1.00 - 3.00)", best]
    best = "1.10 (1.00 - 1.20), plain"
    assert rows["4"] == ["400.0", "300.0", "100.0", "440.0", "1.0", "1.10 (1.00 - 1.20)", best]


def test_waits_and_drafts_are_those_of_vllms_result() -> None:
    table = waits_table(Results(SIDES, measurements()), "code")
    assert list(table.rows[0]) == ["1", "plain", "50.0", "80.0", "5.0", "6.0", "-"]
    assert list(table.rows[3]) == ["1", "ours", "50.0", "80.0", "5.0", "6.0", "2.35"]


@pytest.mark.parametrize(
    ("cache_tokens", "preemptions", "count", "holds"),
    [
        (240, 0, 2, True),
        (239, 0, 2, False),
        (240, 0, 3, False),
        (240, 1, 2, False),
        (600, 0, 9, True),
        (599, 0, 9, False),
    ],
)
def test_whether_the_cache_held_all_requests(
    cache_tokens: int, preemptions: int, count: int, holds: bool
) -> None:
    sizes = {"total_input_tokens": 500, "total_output_tokens": 100, "completed": 5}
    counted = {"cache_tokens": cache_tokens, "preemptions": preemptions}
    assert holds_all(sizes | counted, count) is holds


def test_file_and_notes(tmp_path: Path) -> None:
    command = ["vllm-dflash", "bench", "--quick"]
    cells = [Cell("code", 1, ("--output-len", "8"))]
    record = Record(describe(command, "a pair", cells), SIDES, rounds=9)
    record.finish_round(measurements())
    record.write(tmp_path)
    (file,) = tmp_path.iterdir()
    saved = json.loads(file.read_text())
    assert (file.name, saved["schema"]) == ("result.json", "vllm-dflash.bench/3")
    assert saved["rounds_complete"] == 1
    assert saved["measurements"] == record.measurements
    assert [Side(**side) for side in saved["sides"]] == SIDES
    assert saved["about"]["cells"][0]["flags"] == ["--output-len", "8"]
    assert saved["about"]["command"] == "vllm-dflash bench --quick"
    assert record.notes[0].startswith("a pair; ")
    assert record.notes[-1] == "1 of 9 rounds are complete."
