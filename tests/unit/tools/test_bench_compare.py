"""Rounds of `vllm-dflash bench` with servers and a client that answer at once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest

pytest.importorskip("matplotlib")

from vllm_dflash.tools.bench import bench_runs, sides
from vllm_dflash.tools.bench.bench_command import run_and_report
from vllm_dflash.tools.bench.bench_result import Record
from vllm_dflash.tools.bench.bench_runs import Cell, Comparison
from vllm_dflash.tools.bench.bench_setup import describe
from vllm_dflash.tools.bench.sides import make_sides
from vllm_dflash.tools.cli import run_command
from vllm_dflash.tools.console import COULD_NOT_RUN
from vllm_dflash.tools.progress import Progress
from vllm_dflash.tools.server import EngineDied

CELLS = [Cell("texts", count, ("--num-prompts", "4")) for count in (1, 4)]
FACTS = {"versions": {"vllm": "1.2.3"}}


class Up:
    """A server that is up at once. The class keeps what happens to all of them."""

    events: ClassVar[list[tuple[str, str]]]
    started: ClassVar[dict[str, dict[str, Any]]]
    refuses = ""
    lives = -1
    """Measurements until one dies."""

    def __init__(self, log: Path, model: str, flags: list[str], **more: Any) -> None:
        self.name, self.facts = log.stem, FACTS
        self.events.append(("start", self.name))
        self.started[self.name] = more

    def wait(self) -> None:
        self.events.append(("up", self.name))
        if self.refuses:
            raise ValueError(self.refuses)

    def dismiss(self) -> None:
        self.events.append(("dismiss", self.name))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.events.append(("leave", self.name))


Asked = list[tuple[str, Cell, int, Path]]


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> type[Up]:
    """Return the class of the servers that `bench` starts."""

    class Fresh(Up):
        events: ClassVar[list[tuple[str, str]]] = []
        started: ClassVar[dict[str, dict[str, Any]]] = {}

    monkeypatch.setattr(sides, "Server", Fresh)
    return Fresh


@pytest.fixture
def asked(servers: type[Up], monkeypatch: pytest.MonkeyPatch) -> Asked:
    """What a client that answers at once is asked."""
    asked: Asked = []

    def measure(server: Any, cell: Cell, seed: int, file: Path) -> dict[str, Any]:
        if len(asked) == server.lives:
            file.parent.mkdir(parents=True)
            file.write_text("it broke")
            raise EngineDied(file)
        asked.append((server.name, cell, seed, file))
        return {"output_throughput": 7.0 * len(asked), "ttfts": [1.0], "itls": [[2.0]]}

    monkeypatch.setattr(bench_runs, "measure", measure)
    return asked


def comparison(
    out: Path, at_once: int = 1, flags: Sequence[str] = (), beside: Sequence[str] = ()
) -> Comparison:
    compared = make_sides("drafter", [3], beside)
    record = Record(describe(["bench"], "a pair", CELLS), compared, rounds=3)
    return Comparison(record, CELLS, "target", [*flags], out, Progress(), at_once)


def test_rounds(tmp_path: Path, asked: Asked) -> None:
    """Sides take turns in being first, and get the same load."""
    one = comparison(tmp_path)
    one.run()
    triples = [asked[i : i + 3] for i in range(0, len(asked), 3)]
    assert len(triples) == 4 * 2  # a warm-up round and 3 others, 2 cells
    names = [[name for name, *_ in triple] for triple in triples]
    assert all(sorted(order) == ["native-K=3", "ours", "plain"] for order in names)
    in_turn = ["plain", "native-K=3", "ours"]
    assert [order[0] for order in names[2:]] == [side for side in in_turn for _ in range(2)]
    loads = [[(cell.concurrency, seed) for _, cell, seed, _ in triple] for triple in triples]
    assert loads == [[(count, seed)] * 3 for seed in range(4) for count in (1, 4)]
    assert len({file for *_, file in asked}) == len(asked)  # no result replaces another's
    measured = one.record.measurements  # without the warm-up
    assert [m["round"] for m in measured] == [0] * 6 + [1] * 6 + [2] * 6
    assert measured[0]["result"] == {"output_throughput": 7.0 * 7}  # no details
    assert json.loads((tmp_path / "result.json").read_text())["measurements"] == measured
    assert one.record.about["versions"]["vllm"] == "1.2.3"


@pytest.mark.parametrize("flags", [[], ["--kv-cache-memory-bytes", "9"]])
def test_each_of_ours_starts_alone_and_only_ours_have_the_plugin(
    tmp_path: Path,
    asked: Asked,
    servers: type[Up],
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
) -> None:
    """Plugins of other packages stay."""
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setenv("VLLM_PLUGINS", "dflash,theirs")
    comparison(tmp_path, 2, flags, ["blocks"]).run()
    blocks = "ours,-blocks-only"
    up = ["ours", "ours", blocks, blocks, "plain", "native-K=3", "plain", "native-K=3"]
    assert [name for _, name in servers.events[:8]] == up
    plugins = {name: more["environment"]["VLLM_PLUGINS"] for name, more in servers.started.items()}
    assert plugins == {
        "ours": "theirs,dflash",
        blocks: "theirs,dflash",
        "plain": "theirs",
        "native-K=3": "theirs",
    }
    space = {more["environment"]["VLLM_CPU_KVCACHE_SPACE"] for more in servers.started.values()}
    assert space == {None if flags else "1"}  # on CPUs it would override the flag


def test_what_vllms_own_would_run_under_our_name_ends_in_one_line(
    tmp_path: Path, servers: type[Up], capsys: pytest.CaptureFixture[str]
) -> None:
    """A server that requires us, and that we cannot run, refuses its arguments."""
    servers.refuses = "vllm-dflash cannot run this engine: it is odd."
    run = partial(run_and_report, comparison(tmp_path))
    assert run_command("vllm-dflash bench", run) == COULD_NOT_RUN
    printed = capsys.readouterr()
    assert printed.err == "vllm-dflash bench: vllm-dflash cannot run this engine: it is odd.\n"
    assert not printed.out
    assert [name for event, name in servers.events if event == "leave"] == ["ours"]


def test_a_plot_is_drawn(tmp_path: Path, asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_and_report(comparison(tmp_path)) == 0
    assert (tmp_path / "result.png").read_bytes().startswith(b"\x89PNG")
    assert f"Written: result.json, result.png in {tmp_path}, " in capsys.readouterr().out


@pytest.mark.parametrize(("name", "rounds"), [("result.json", 1), ("result.png", 3)])
def test_results_that_cannot_be_written_are_still_printed(
    tmp_path: Path, asked: Asked, capsys: pytest.CaptureFixture[str], name: str, rounds: int
) -> None:
    (tmp_path / name).mkdir()  # fails as a full disk does
    run = partial(run_and_report, comparison(tmp_path))
    assert run_command("vllm-dflash bench", run) == COULD_NOT_RUN
    printed = capsys.readouterr()
    assert "texts: tokens/s, median of rounds" in printed.out
    assert f"{rounds} of 3 rounds are complete." in printed.out
    assert "Written" not in printed.out
    assert name in printed.err
    assert "Traceback" not in printed.err


def test_a_death_leaves_complete_rounds_and_no_server(
    tmp_path: Path, asked: Asked, servers: type[Up]
) -> None:
    servers.lives = 16  # until the second round that counts
    with pytest.raises(EngineDied, match="it broke"):
        comparison(tmp_path).run()
    saved = json.loads((tmp_path / "result.json").read_text())
    assert (saved["rounds_complete"], saved["rounds"]) == (1, 3)
    assert {m["round"] for m in saved["measurements"]} == {0}
    ends = [event for event, _ in servers.events[-6:]]
    assert ends == ["dismiss"] * 3 + ["leave"] * 3  # all are told before one is waited for
