"""Rounds of `vllm-dflash bench` with children that answer at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from vllm_dflash.tools.bench import compare_sides as compare
from vllm_dflash.tools.bench.bench_plan import CLOSED, SWING, Workload
from vllm_dflash.tools.bench.bench_record import Record, describe
from vllm_dflash.tools.bench.compare_sides import Comparison
from vllm_dflash.tools.bench.sides import make_sides
from vllm_dflash.tools.engine_process import EngineDied, EngineProcess
from vllm_dflash.tools.progress import Silent

Asked = tuple[str, str, dict[str, Any]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    """Every question: side, question, arguments."""
    questions: list[Asked] = []

    class InstantProcess(EngineProcess):
        def __init__(self, log: Path, *, environment: dict[str, str], **arguments: Any) -> None:
            self.side = log.stem.replace("-", " ")
            self.stats = {"plugins": environment["VLLM_PLUGINS"], "arguments": arguments}

        def __enter__(self) -> InstantProcess:
            return self

        def __exit__(self, *error: object) -> None:
            questions.append((self.side, "leave", {}))

        def dismiss(self) -> None:
            pass

        def ask(self, question: str, **arguments: Any) -> Any:
            questions.append((self.side, question, arguments))
            match question:
                case "facts":
                    return {"versions": {"vllm": "1.2.3"}}
                case "dflash_stats":
                    return [self.stats]
                case "closed":
                    count = arguments["concurrency"]
                    best = count == (1 if self.side == "native K=3" else 4)
                    return {"tokens_per_second": 100.0 * count + best}
                case "swing":
                    counts = [count for count, _ in arguments["phases"]]
                    return {"concurrency": counts, "seconds": [1.0] * len(counts)}

    monkeypatch.setattr(compare, "EngineProcess", InstantProcess)
    return questions


def comparison(out: Path, *loads: str, rounds: int = 3, tuned: bool = False) -> Comparison:
    workload = Workload(loads, (1, 4), phases=(1, 8), rates=(), tokens=10, seconds=2.0)
    record = Record(
        describe(["bench"], "a pair", {}, workload), make_sides("drafter", [3], []), rounds
    )
    prompts = [f"prompt {number}" for number in range(20)]
    engine = {"model": "target"}
    return Comparison(record, workload, prompts, engine, 1, out, Silent(), tuned)


def of(asked: list[Asked], question: str) -> list[Asked]:
    return [one for one in asked if one[1] == question]


def test_sides_take_turns_in_being_first(tmp_path: Path, asked: list[Asked]) -> None:
    comparison(tmp_path, CLOSED).run()
    sides = [side for side, _, _ in of(asked, "closed")]
    each = [sides[i : i + 3] for i in range(0, len(sides), 3)]
    assert len(each) == 4 * 2  # a warm-up round and 3 others, 2 concurrencies
    assert all(sorted(order) == ["native K=3", "ours", "plain"] for order in each)
    assert {order[0] for order in each[2:]} == {"native K=3", "ours", "plain"}


def test_all_sides_of_a_round_get_the_same_load(tmp_path: Path, asked: list[Asked]) -> None:
    comparison(tmp_path, CLOSED).run()
    loads = [arguments for _, _, arguments in of(asked, "closed")]
    triples = [loads[i : i + 3] for i in range(0, len(loads), 3)]
    assert all(triple[0] == triple[1] == triple[2] for triple in triples)
    orders = {tuple(triple[0]["prompts"]) for triple in triples}
    assert len(orders) == 4  # one of each round


def test_warm_up_does_not_count(tmp_path: Path, asked: list[Asked]) -> None:
    one = comparison(tmp_path, CLOSED)
    one.run()
    assert [m["round"] for m in one.record.measurements] == [0] * 6 + [1] * 6 + [2] * 6


def test_only_ours_has_stats_and_the_plugin(tmp_path: Path, asked: list[Asked]) -> None:
    one = comparison(tmp_path, CLOSED)
    one.run()
    stats = {m["side"]: m["stats"] for m in one.record.measurements}
    assert stats["plain"] is None
    assert stats["native K=3"] is None
    assert stats["ours"]["plugins"] == "dflash"
    assert stats["ours"]["arguments"] == {
        "model": "target",
        "speculative_config": {"method": "dflash", "model": "drafter"},
    }
    assert one.record.about["versions"]["vllm"] == "1.2.3"


def test_swing_is_sized_by_plain_decoding(tmp_path: Path, asked: list[Asked]) -> None:
    comparison(tmp_path, SWING).run()
    assert {side for side, _, _ in of(asked, "closed")} == {"plain"}
    assert of(asked, "swing")[0][2]["phases"] == [(1, 200), (8, 1600)]


def test_a_tuned_schedule_has_the_fastest_k_of_each_concurrency(
    tmp_path: Path, asked: list[Asked]
) -> None:
    one = comparison(tmp_path, CLOSED, tuned=True)
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
    assert measured.count("native schedule") == measured.count("plain") == 3 * 2
    assert len(of(asked, "leave")) == 4


@pytest.mark.parametrize(
    ("loads", "tuned", "said"),
    [
        # 3 engines x (40 s + 4 rounds x 2 settings x 2 s)
        (
            [CLOSED],
            False,
            "3 engines (plain, native K=3, ours) are started, then follow rounds, 1",
        ),
        ([CLOSED], False, "to warm up and 3 that count: about 3 minutes"),
        # 4 engines x (40 s + 4 rounds x (2 settings + 2 phases) x 2 s), and 3 concurrencies x 2
        # sides x twice 2 s to tune
        ([CLOSED, SWING], True, "4 engines (plain, native K=3, native schedule, ours)"),
        ([CLOSED, SWING], True, "about 5 minutes"),
    ],
)
def test_says_what_it_is_going_to_do(
    tmp_path: Path, loads: list[str], tuned: bool, said: str
) -> None:
    assert said in comparison(tmp_path, *loads, tuned=tuned).announcement()


def test_all_may_leave_before_the_first_is_waited_for(
    tmp_path: Path, asked: list[Asked], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where Ctrl-C comes while the last engine starts."""

    def dismiss(child: Any) -> None:
        asked.append((child.side, "dismissed", {}))

    def facts(child: Any, question: str, **arguments: Any) -> Any:
        if child.side == "ours":
            raise KeyboardInterrupt
        return {"versions": {}}

    instant: type[EngineProcess] = vars(compare)["EngineProcess"]
    monkeypatch.setattr(instant, "dismiss", dismiss)
    monkeypatch.setattr(instant, "ask", facts)
    with pytest.raises(KeyboardInterrupt):
        comparison(tmp_path, CLOSED).run()
    kinds = [question for _, question, _ in asked]
    assert kinds == ["dismissed"] * 2 + ["leave"] * 3


def test_a_death_leaves_complete_rounds_and_no_child(
    tmp_path: Path, asked: list[Asked], monkeypatch: pytest.MonkeyPatch
) -> None:
    instant: type[EngineProcess] = vars(compare)["EngineProcess"]
    ask = instant.ask
    log = tmp_path / "log"
    log.write_text("it broke")

    def mortal(child: Any, question: str, **arguments: Any) -> Any:
        if len(of(asked, "closed")) == 16:  # in the second round that counts
            raise EngineDied(log)
        return ask(child, question, **arguments)

    monkeypatch.setattr(instant, "ask", mortal)
    with pytest.raises(EngineDied, match="it broke"):
        comparison(tmp_path, CLOSED).run()
    saved = json.loads((tmp_path / "result.json").read_text())
    assert saved["rounds_complete"] == 1
    assert saved["rounds"] == 3
    assert {m["round"] for m in saved["measurements"]} == {0}
    assert len(of(asked, "leave")) == 3
