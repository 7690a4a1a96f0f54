"""Rounds of `vllm-dflash bench` with children that answer at once."""

from __future__ import annotations

import json
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from support.instant_engines import Question, of, recording_processes
from vllm_dflash.tools.bench import sides
from vllm_dflash.tools.bench.bench_command import run_and_report
from vllm_dflash.tools.bench.bench_datasets import Asked, Dataset
from vllm_dflash.tools.bench.bench_plan import CLOSED, Workload
from vllm_dflash.tools.bench.bench_record import Record, describe
from vllm_dflash.tools.bench.comparison import Comparison
from vllm_dflash.tools.bench.sides import SideEngines, make_sides
from vllm_dflash.tools.cli import run_command
from vllm_dflash.tools.console import COULD_NOT_RUN
from vllm_dflash.tools.engine_process import EngineDied, EngineProcess
from vllm_dflash.tools.progress import Progress


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Question]:
    """Record every question: side, question, arguments."""
    questions: list[Question] = []
    monkeypatch.setattr(sides, "EngineProcess", recording_processes(questions))
    return questions


def comparison(
    out: Path,
    rounds: int = 3,
    at_once: int = 1,
    progress: Progress | None = None,
    dataset: Dataset | None = None,
) -> Comparison:
    loads = (CLOSED,) if dataset is None else ()
    workload = Workload(loads, (1, 4), tokens=10, seconds=2.0)
    record = Record(describe(["bench"], "a pair", {}, workload), make_sides("drafter", [3]), rounds)
    prompts = {"": [f"prompt {number}" for number in range(20)]}
    engines = SideEngines({"model": "target"}, at_once, out / "logs")
    parts = record, workload, prompts, engines, out, progress or Progress()
    return Comparison(*parts, dataset=dataset)


def test_sides_take_turns_in_being_first(tmp_path: Path, asked: list[Question]) -> None:
    comparison(tmp_path).run()
    sides = [side for side, _, _ in of(asked, "closed")]
    each = [sides[i : i + 3] for i in range(0, len(sides), 3)]
    assert len(each) == 4 * 2  # a warm-up round and 3 others, 2 concurrencies
    assert all(sorted(order) == ["native K=3", "ours", "plain"] for order in each)
    in_turn = ["plain", "native K=3", "ours"]
    assert [order[0] for order in each[2:]] == [side for side in in_turn for _ in range(2)]


def test_all_sides_of_a_round_get_the_same_load(tmp_path: Path, asked: list[Question]) -> None:
    comparison(tmp_path).run()
    loads = [arguments for _, _, arguments in of(asked, "closed")]
    triples = [loads[i : i + 3] for i in range(0, len(loads), 3)]
    assert all(triple[0] == triple[1] == triple[2] for triple in triples)
    orders = {tuple(triple[0]["prompts"]) for triple in triples}
    assert len(orders) == 4  # one per round


def test_warm_up_does_not_count(tmp_path: Path, asked: list[Question]) -> None:
    one = comparison(tmp_path)
    one.run()
    assert [m["round"] for m in one.record.measurements] == [0] * 6 + [1] * 6 + [2] * 6


def test_only_ours_has_stats_and_the_plugin(tmp_path: Path, asked: list[Question]) -> None:
    one = comparison(tmp_path)
    one.run()
    stats = {m["side"]: m["stats"] for m in one.record.measurements}
    assert stats["plain"] is None
    assert stats["native K=3"] is None
    assert stats["ours"]["plugins"] == "dflash"
    assert stats["ours"]["arguments"] == {
        "model": "target",
        "speculative_config": {"method": "dflash", "model": "drafter", "require": True},
    }
    assert one.record.about["versions"]["vllm"] == "1.2.3"


FIRST = Asked("calm", "one", 9)
ASKED = [FIRST, Asked("wild", "two", 9), Asked("wild", "twelve letters", 9)]


@pytest.mark.parametrize("template", [None, {"enable_thinking": True}])
def test_a_set_of_prompts_is_served_whole_in_every_round(
    tmp_path: Path, asked: list[Question], template: dict[str, bool] | None
) -> None:
    said = StringIO()
    dataset = Dataset("mt_bench", ASKED * 5, {"temperature": 0.5}, template)
    one = comparison(tmp_path, progress=Progress(said), rounds=2, dataset=dataset)
    one.run()
    texts = [each.prompt for each in ASKED * 5]
    assert of(asked, "encode") == [("plain", "encode", {"texts": texts, "template": template})]
    assert "5 of 15 prompts are left out: with their answers, they exceed 20" in said.getvalue()
    loads = [arguments for side, _, arguments in of(asked, "answers") if side == "ours"]
    assert [each["concurrency"] for each in loads] == [1, 4] * 3
    for each in loads[2:]:  # after the warm-up
        assert each["prompts"] == ([*map(ord, "one")], [*map(ord, "two")]) * 5
        assert (each["answers"], each["categories"]) == ((9,) * 10, ("calm", "wild") * 5)
        assert each["sampling"] == {"temperature": 0.5}
    titles = [table.title for table in one.record.tables]
    assert [title for title in titles if "TTFT" in title and "4 in flight" in title] != []


def test_no_prompt_of_a_set_fits(tmp_path: Path, asked: list[Question]) -> None:
    one = comparison(tmp_path, dataset=Dataset("mt_bench", [FIRST._replace(tokens=18)], {}, None))
    with pytest.raises(ValueError, match=r"1 of 1 prompts are left out.*Raise --max-model-len"):
        one.run()


def test_what_vllms_own_would_run_under_our_name_ends_in_one_line(
    tmp_path: Path,
    asked: list[Question],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An engine that requires us, and that we cannot run, refuses its arguments."""
    instant: type[EngineProcess] = vars(sides)["EngineProcess"]

    def refuse(child: Any) -> Any:
        assert child.stats["arguments"]["speculative_config"]["require"]
        raise ValueError("vllm-dflash cannot run this engine: it is odd.")

    monkeypatch.setattr(instant, "receive", refuse)
    run = partial(run_and_report, comparison(tmp_path))
    assert run_command("vllm-dflash bench", run) == COULD_NOT_RUN
    printed = capsys.readouterr()
    assert printed.err == "vllm-dflash bench: vllm-dflash cannot run this engine: it is odd.\n"
    assert not printed.out
    assert [side for side, question, _ in asked if question == "leave"] == ["ours"]


@pytest.mark.parametrize("name", ["result.json", "result.md", "result.png"])
def test_results_that_cannot_be_written_are_still_printed(
    tmp_path: Path, asked: list[Question], capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / name).mkdir()  # fails as a full disk does
    run = partial(run_and_report, comparison(tmp_path))
    assert run_command("vllm-dflash bench", run) == COULD_NOT_RUN
    printed = capsys.readouterr()
    assert "closed: tokens/s, median of rounds" in printed.out
    assert "1 of 3 rounds are complete." in printed.out
    assert "Written" not in printed.out
    assert f"NOT all written to {tmp_path}" in printed.out
    assert f"could not write all results to {tmp_path}" in printed.err
    assert "Traceback" not in printed.err


def test_a_death_leaves_complete_rounds_and_no_child(
    tmp_path: Path, asked: list[Question], monkeypatch: pytest.MonkeyPatch
) -> None:
    instant: type[EngineProcess] = vars(sides)["EngineProcess"]
    receive = instant.receive
    log = tmp_path / "log"
    log.write_text("it broke")

    def mortal(child: Any) -> Any:
        if len(of(asked, "closed")) == 16:  # in the second round that counts
            raise EngineDied(log)
        return receive(child)

    monkeypatch.setattr(instant, "receive", mortal)
    with pytest.raises(EngineDied, match="it broke"):
        comparison(tmp_path).run()
    saved = json.loads((tmp_path / "result.json").read_text())
    assert saved["rounds_complete"] == 1
    assert saved["rounds"] == 3
    assert {m["round"] for m in saved["measurements"]} == {0}
    assert len(of(asked, "leave")) == 3
