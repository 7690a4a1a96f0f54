"""Rounds of `benchmarks/loads` with engines that answer at once."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from loads.comparison import LoadsComparison, tuned_schedule
from loads.report import LoadsRecord
from loads.step_times import KINDS, OF_A_KIND
from loads.workload import ARRIVALS, SHORT, SWING, LoadsWorkload
from support.instant_engines import Question, of, recording_processes
from vllm_dflash.tools.bench import sides
from vllm_dflash.tools.bench.bench_record import describe
from vllm_dflash.tools.bench.sides import SideEngines, make_sides
from vllm_dflash.tools.progress import Progress

SERVED = {"tokens_per_second": 28.0, "first_token_seconds": [1.0, 3.0], "token_seconds": [0.5]}
SPENT = {f"{kind}: {what}": 0.0 for kind in KINDS for what in OF_A_KIND}
SPENT |= {"target": 0.5, "draft": 0.1, "seconds": 1.0, "steps": 10, "tokens": 20}
ANSWERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "arrivals": lambda _: SERVED,
    "decoding": lambda _: {"tokens_per_second": 100.0},
    "swing": lambda _: {"concurrency": [1, 8], "tokens_per_second": [1.0, 1.0]},
    "where": lambda _: {"spent": SPENT},
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Question]:
    questions: list[Question] = []
    monkeypatch.setattr(sides, "EngineProcess", recording_processes(questions, ANSWERS))
    return questions


def comparison(
    out: Path, *loads: str, said: StringIO | None = None, **more: Any
) -> LoadsComparison:
    workload = LoadsWorkload(loads, (1, 4), 10, 2.0, phases=(1, 8), shares=(50,), **more)
    record = LoadsRecord(describe(["loads"], "a pair", {}, workload), make_sides("drafter", [3]), 2)
    prompts = {"": [f"prompt {number}" for number in range(20)]}
    engines = SideEngines({"model": "target"}, 1, out / "logs")
    return LoadsComparison(record, workload, prompts, engines, out, Progress(said))


def test_loads_are_sized_by_plain_decoding(tmp_path: Path, asked: list[Question]) -> None:
    """Twice at each concurrency; the second time counts."""
    one = comparison(tmp_path, SWING, SHORT, ARRIVALS, where=True)
    one.run()
    assert [side for side, _, _ in of(asked, "closed")] == ["plain"] * 4  # twice at 1 and at 8
    assert of(asked, "swing")[0][2]["phases"] == [(1, 200), (8, 1600)]
    assert one.record.results.settings(SWING) == ["1: 1", "2: 8"]
    plans = of(asked, "answers")
    assert [side for side, _, _ in plans[:4]] == ["plain"] * 4
    # 28 tokens/s make one answer of 56 in two seconds; each client gets at least two.
    assert [len(arguments["answers"]) for _, _, arguments in plans[4:7]] == [2, 2, 2]
    assert of(asked, "arrivals")[0][2]["arrivals"][-1] >= 2.0
    (waits,) = [table for table in one.record.tables if table.title.startswith("short: ms")]
    assert waits.rows[0] == ["1", "plain", "2000", "3000", "500", "500"]
    assert {w["load"] for w in one.record.where} == {SHORT}


def test_contexts_are_measured_where_there_is_room(tmp_path: Path, asked: list[Question]) -> None:
    said = StringIO()
    one = comparison(tmp_path, said=said, contexts=(100, 800))
    one.run()
    settings = {("context, 1 at a time", 100), ("context, 1 at a time", 800)}
    settings |= {("context, 4 at a time", 100)}  # 4 of 800 would take more than 900
    assert {(m["load"], m["setting"]) for m in one.record.measurements} == settings
    assert "1 settings are left out: the engines' caches hold 900 tokens each" in said.getvalue()
    assert "to read prompts of 3,200 tokens. Ctrl" in said.getvalue()
    prompts = of(asked, "decoding")[0][2]["prompts"]  # real text, tokenized once
    assert "".join(map(chr, prompts[0])).startswith("prompt 0\nprompt 1\nprompt 2\n")
    assert len(of(asked, "encode")) == 1
    with pytest.raises(ValueError, match=r"no room for any .* VLLM_CPU_KVCACHE_SPACE"):
        comparison(tmp_path, contexts=(2000,)).run()


def test_a_tuned_schedule_has_the_fastest_k_of_each_concurrency(
    tmp_path: Path, asked: list[Question]
) -> None:
    one = comparison(tmp_path, "closed")
    one.tune_schedule = True
    assert "native schedule" in one.announcement()
    one.run()
    sides = {side.name: side for side in one.record.sides}
    assert list(sides) == ["plain", "native K=3", "native schedule", "ours"]
    assert sides["native schedule"].speculative_config == {
        "method": "dflash",
        "model": "drafter",
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [[1, 3, 3], [4, 4, 0]],
    }
    measured = [m["side"] for m in one.record.measurements]
    assert measured.count("native schedule") == measured.count("plain") == 2 * 2
    assert len(of(asked, "leave")) == 4


@pytest.mark.parametrize(
    ("rates", "ranges"),
    [
        ({1: {0: 5.0, 3: 9.0, 7: 8.0}}, [[1, 1, 3]]),
        ({2: {0: 5.0, 3: 9.0}, 8: {0: 9.0, 3: 5.0}}, [[1, 7, 3], [8, 8, 0]]),
        (
            {4: {0: 1.0, 1: 2.0}, 1: {0: 1.0, 7: 2.0}, 2: {0: 1.0, 3: 2.0}},
            [[1, 1, 7], [2, 3, 3], [4, 4, 1]],
        ),
    ],
)
def test_a_schedule_holds_the_fastest_k_from_each_concurrency_on(
    rates: dict[int, dict[int, float]], ranges: list[list[int]]
) -> None:
    from vllm.v1.spec_decode.dynamic.utils import validate_and_normalize_dynamic_sd_schedule

    config = tuned_schedule("drafter", rates).speculative_config or {}
    assert config["num_speculative_tokens_per_batch_size"] == ranges
    assert config["num_speculative_tokens"] == max(max(of_count) for of_count in rates.values())
    assert validate_and_normalize_dynamic_sd_schedule(ranges) == [(*one,) for one in ranges]
