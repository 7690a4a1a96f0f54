"""The GPU kit's soak and its texts, on engines that are made up here."""

from __future__ import annotations

import argparse
import itertools
import json
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpu import gpu_kernels, gpu_soak, gpu_text, random_traffic
from gpu.random_traffic import SoakedEngine
from support import DEMO
from vllm_dflash.tools.engine_process import EngineDied
from vllm_dflash.tools.stepped_engine import Output
from vllm_dflash.tools.verify.verification import Level, Verification

PROMPTS = [[1, 2], [3]]


class Stepped:
    """Writes the prompt's last number once a step; each request is heard of when it is done."""

    def __init__(self) -> None:
        self.live: dict[str, tuple[int, int, int]] = {}
        self.seen: Counter[str] = Counter()
        self.most = 0

    def add(self, name: str, prompt: list[int], tokens: int, **more: Any) -> None:
        assert name not in self.live
        self.live[name] = (prompt[-1], tokens, 0)
        self.seen["plain" if more == {"whole": True} else "other"] += 1
        self.most = max(self.most, len(self.live))

    def abort(self, names: list[str]) -> None:
        for name in names:
            del self.live[name]
        self.seen["hung up"] += len(names)

    def step(self) -> list[Output]:
        assert self.live
        done = []
        for name, (word, tokens, written) in [*self.live.items()]:
            self.live[name] = (word, tokens, written + 1)
            if written + 1 == tokens:
                del self.live[name]
                done.append(Output(name, [word] * tokens, True))
        return done


def test_random_traffic_asks_hangs_up_and_settles(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = itertools.count()  # a second passes between two looks at the clock
    monkeypatch.setattr(random_traffic, "time", SimpleNamespace(monotonic=lambda: next(looks)))
    metric = SimpleNamespace(name="vllm:num_preemptions", value=3)
    soaked = SoakedEngine(SimpleNamespace(get_metrics=lambda: [metric]))
    stepped: Any = Stepped()
    soaked.add, soaked.abort, soaked.step = stepped.add, stepped.abort, stepped.step
    others = [{"temperature": 1.0}]
    for seed in (1, 2):
        found = soaked.traffic(PROMPTS, (2, 5), others, most=4, seed=seed, seconds=300)
    found = soaked.settle()
    assert not stepped.live
    seen = found["seen"]
    asked = stepped.seen["plain"] + stepped.seen["other"]
    assert seen["served"] + seen["hung up"] == asked
    assert seen["hung up"] == stepped.seen["hung up"] > 0
    assert min(stepped.seen.values()) > 0
    assert stepped.most <= 6
    assert seen["preempted"] == 3
    texts = {(prompt, limit): tokens for prompt, limit, tokens in found["texts"]}
    assert texts[0, 5] == (2,) * 5
    assert {*texts} == {(prompt, limit) for prompt in (0, 1) for limit in (2, 5)}


class Writer:
    """Answers what both engines of a soak are asked; `wrong` is written in one text."""

    def __init__(self, wrong: int | None = None, **stats: int) -> None:
        self.wrong, self.stats = wrong, stats

    def encode(self, texts: list[str]) -> list[list[int]]:
        return PROMPTS

    def facts(self) -> dict[str, Any]:
        return {"stop_tokens": [0]}

    def submit(self, requests: list[Any], concurrency: int) -> None:
        self.requests = requests

    def advance(self, seconds: float) -> list[Any]:
        done = enumerate(self.requests)
        return [(i, [one.tokens[-1]] * one.max_tokens, one.scored and 0.5) for i, one in done]

    def traffic(self, **arguments: Any) -> dict[str, Any]:
        return self.settle()

    def settle(self) -> dict[str, Any]:
        texts = [[0, 2, [2, 2]], [1, 3, [3, self.wrong or 3, 3]]]
        return {"seen": {"served": 2, "hung up": 1}, "texts": texts}

    def dflash_stats(self) -> list[dict[str, int]]:
        return [dict.fromkeys(gpu_soak.NEVER, 0) | self.stats]


def soak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ours: Writer, used: str = "7") -> Any:
    @contextmanager
    def process(log: Path, start: str = "", **settings: Any) -> Any:
        log.parent.mkdir(exist_ok=True)
        log.write_text("Using X backend")
        yield SimpleNamespace(answers=ours if start else Writer())

    looks = iter(["7", *[used] * 1000])
    monkeypatch.setattr(gpu_soak, "EngineProcess", process)
    monkeypatch.setattr(gpu_soak, "SECONDS_AT_A_TIME", 0.01)
    monkeypatch.setattr(gpu_soak, "ask_gpu", lambda name: [next(looks)])
    (tmp_path / "json").mkdir()
    file = tmp_path / "json" / "soak.json"
    options = ["--dtype", "float32", "--seconds", "0.001", "--tiny", str(file)]
    monkeypatch.setattr("sys.argv", ["gpu_soak", *options])
    return gpu_soak.main(), json.loads(file.read_text())["verdict"]


def test_a_soak_that_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, verdict = soak(tmp_path, monkeypatch, Writer())
    assert (code, verdict) == (0, "0 s; 2 served, 1 hung up, 0 preempted")


def test_a_text_that_is_not_plain_decodings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, verdict = soak(tmp_path, monkeypatch, Writer(wrong=9))
    assert code == 1
    assert verdict.endswith("preempted; 2 divergences")


@pytest.mark.parametrize("name", gpu_soak.NEVER)
def test_counters_that_must_stay_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    code, verdict = soak(tmp_path, monkeypatch, Writer(**{name: 4}))
    assert (code, verdict.rpartition("; ")[2]) == (1, f"{name.replace('_', ' ')}: 4")


def test_an_engine_that_dies_under_load_leaves_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = Writer()
    (tmp_path / "log").write_text("RuntimeError: an illegal memory access")

    def die() -> Any:
        raise EngineDied(tmp_path / "log")

    monkeypatch.setattr(ours, "settle", die)
    monkeypatch.setattr(ours, "traffic", lambda **more: {"seen": {"served": 5}, "texts": []})
    (tmp_path / "a").mkdir()
    code, verdict = soak(tmp_path / "a", monkeypatch, ours)
    assert code == 1
    assert "5 served" in verdict
    assert "died: an engine died: RuntimeError: an illegal memory access" in verdict


@pytest.mark.parametrize(
    ("length", "regressions", "is_fine"), [(2.8, 0, True), (1.7, 0, False), (2.8, 1, False)]
)
def test_texts_and_acceptance_are_as_on_a_cpu(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    length: float,
    regressions: int,
    is_fine: bool,
) -> None:
    divergence = SimpleNamespace(is_tie=False, regret=1.0, to_dict=dict)
    level: Any = Level.of(8, 7, length, ((divergence,) * regressions,))  # type: ignore[arg-type]

    @contextmanager
    def side(target: str, config: Any, log: Path, **more: Any) -> Any:
        log.write_text("Using TRITON_ATTN backend")
        yield log

    def verify(prompts: list[str], ours: Any, plain: Any, *rest: Any) -> Verification:
        with ours() as _, plain() as _:
            return Verification({}, 0.0, (level,))

    monkeypatch.setattr(gpu_text, "open_side", side)
    monkeypatch.setattr(gpu_text, "verify", verify)
    options = argparse.Namespace(
        prompts=DEMO / "held_out.jsonl",
        dtype="float32",
        backend="TRITON_ATTN",
        mode="eager",
        name="text",
        concurrency=[8],
        tokens=64,
        tiny=False,
        tree=None,
    )
    found = gpu_text.compare(options, tmp_path)
    assert found["ok"] is is_fine
    assert found["verdict"].endswith(f"{length:.2f} tokens a step, 2.79 on a CPU")
    assert found["log"] == ["Using TRITON_ATTN backend"]


def fails() -> str:
    raise OSError("undefined symbol")


def test_checks_go_on_behind_one_that_fails(tmp_path: Path) -> None:
    found: dict[str, str] = {}

    checks = [("a", fails), ("b", lambda: "ok")]
    assert gpu_kernels.run(iter(checks), found, tmp_path / "found.json", 2) == 3
    assert found == {"a": "FAILED: OSError: undefined symbol", "b": "ok"}


def test_checks_end_where_they_are_interrupted(tmp_path: Path) -> None:
    """By the kit, which waits for it before it kills: what was found by then is there."""

    def interrupted() -> str:
        raise KeyboardInterrupt

    checks = [("a", lambda: "ok"), ("b", fails), ("c", interrupted), ("d", lambda: "ok")]
    with pytest.raises(KeyboardInterrupt):
        gpu_kernels.run(iter(checks), {}, tmp_path / "found.json")
    written = json.loads((tmp_path / "found.json").read_text())
    assert written["verdict"].startswith("2 checks, 1 failed")
    assert written["checks"] == {"a": "ok", "b": "FAILED: OSError: undefined symbol"}
