"""Answers of engines in their own processes to commands and benchmarks: loads, texts, times."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from loads.answers import START, LoadsAnswers, importing_benchmarks
from loads.step_times import KINDS, TIMED
from support import DEMO
from support.engines import FIXED
from vllm_dflash.tools.bench.sides import NO_PLUGIN, side_environment
from vllm_dflash.tools.engine_process import EngineProcess
from vllm_dflash.tools.prompts import read_prompts

PROMPTS = read_prompts(DEMO / "held_out.jsonl", 8)
ARGUMENTS: dict[str, Any] = {
    "model": str(DEMO / "target"),
    "dtype": "float32",
    "max_model_len": 512,
    "enforce_eager": True,
    "disable_log_stats": False,  # for `generate`
}

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadsAnswers]:
    log = Path(tmp_path_factory.mktemp("plain")) / "log"
    environment = side_environment(NO_PLUGIN) | importing_benchmarks()
    with EngineProcess(log, start=START, environment=environment, **ARGUMENTS) as process:
        yield cast("LoadsAnswers", process.answers)


def test_closed(plain: LoadsAnswers) -> None:
    result = plain.closed(prompts=PROMPTS, concurrency=3, tokens=8, seconds=0.3)
    assert result["tokens"] >= 3  # at least one step
    assert result["tokens_per_output"] == 1  # without drafts
    assert result["tokens_per_second"] == pytest.approx(result["tokens"] / result["seconds"])


def test_loads_leave_nothing_behind(plain: LoadsAnswers) -> None:
    for _ in range(2):
        result = plain.swing(prompts=PROMPTS, phases=[(4, 40), (1, 10)], tokens=16)
        assert len(result["tokens_per_second"]) == 2
        result = plain.decoding(prompts=PROMPTS, concurrency=2, tokens=4, seconds=0.1)
        assert result["tokens"] >= 2 * 4
        asked: dict[str, Any] = {"prompts": PROMPTS, "answers": [4, 9]}
        assert plain.answers(**asked, concurrency=1)["tokens"] == 4 + 9
        assert plain.arrivals(**asked, arrivals=[0.01, 0.02])["tokens"] == 4 + 9


def test_generate(plain: LoadsAnswers) -> None:
    answer = plain.generate(prompts=PROMPTS[:3], tokens=6)
    assert [len(ids) for ids in answer["token_ids"]] == [6, 6, 6]
    assert answer["tokens_per_second"] > 0
    assert answer["counts"] == {}
    # Each prompt gets its own tokens, whichever finishes first.
    one = plain.generate(prompts=PROMPTS[2:3], tokens=3)
    assert one["token_ids"] == [answer["token_ids"][2][:3]]


def test_a_text_step_by_step(plain: LoadsAnswers) -> None:
    """Plain decoding writes one token a step."""
    assert plain.facts()["has_chat_template"]
    plain.begin_text(prompt=PROMPTS[0], tokens=3)
    steps = [*iter(plain.next_step, None)]
    assert [len(pieces) for pieces in steps] == [1, 1, 1]
    tokens = plain.generate(prompts=PROMPTS[:1], tokens=3)["token_ids"][0]
    assert "".join(piece for pieces in steps for piece in pieces) == "".join(
        plain.decode(tokens=tokens)
    )
    assert plain.next_step() is None


def test_messages_go_through_the_chat_template(plain: LoadsAnswers) -> None:
    (tokens,) = plain.encode(texts=["What is a keel?"], template={"enable_thinking": False})
    assert "".join(plain.decode(tokens=tokens)) == "What is a keel?\n"  # the demo target's
    (long,) = plain.encode(texts=["a keel " * 600], template={})
    assert len(long) > ARGUMENTS["max_model_len"]  # no check here that it fits


@pytest.mark.parametrize(
    "plugins",
    [
        pytest.param(NO_PLUGIN, id="native", marks=pytest.mark.slow),
        pytest.param("dflash", id="ours", marks=pytest.mark.slow),
    ],
)
def test_the_time_of_drafts(tmp_path: Path, plugins: str) -> None:
    """Time vLLM's own drafter as well as ours, by a worker extension: no code is sent."""
    config = {**FIXED, "num_speculative_tokens": 7}
    if plugins == NO_PLUGIN:
        del config["draft_length"]
    arguments = {**ARGUMENTS, "speculative_config": config, "worker_extension_cls": TIMED}
    environment = side_environment(plugins) | importing_benchmarks()
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    log = tmp_path / "log"
    with EngineProcess(log, start=START, environment=environment, **arguments) as process:
        answers = cast("LoadsAnswers", process.answers)
        before = answers.step_times()
        began = time.monotonic()
        counts = answers.generate(prompts=PROMPTS[:2], tokens=6)["counts"]
        took, after = time.monotonic() - began, answers.step_times()
        assert 0 < after["draft"] - before["draft"] < took
        assert 1 <= after["drafts"] - before["drafts"] <= 6  # each is a step of both prompts
        assert counts["drafts"] >= 1
        load = {"prompts": PROMPTS, "concurrency": 2, "tokens": 8, "seconds": 0.1}
        spent = answers.where(**load)["spent"]
        assert spent["drafts"] == spent["steps"] >= 2
        assert spent["tokens"] >= spent["steps"] * 2
        ours = ["planning"] if plugins else []
        times = [spent[part] for part in ("target", "draft", "context", *ours)]
        assert min(times) > 0
        assert sum(times) < spent["seconds"]  # the engine takes time, too
        load = {"prompts": PROMPTS, "answers": [4, 9, 6], "concurrency": 2}
        result = answers.where(**load)
        spent, steps = result["spent"], [f"{kind}: steps" for kind in KINDS]
        assert result["tokens"] == spent["tokens"] == 4 + 9 + 6
        assert len(result["first_token_seconds"]) == len(result["token_seconds"]) == 3
        assert sum(spent[name] for name in steps) == spent["steps"]
        # The first two prompts, and then the third one beside drafts.
        assert spent["prompts: steps"] >= 1
        assert spent["prompts, drafts: steps"] >= 1
        assert spent["decoding, drafts: steps"] >= 1
