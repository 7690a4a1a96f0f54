"""Answers of engines in their own processes to commands and benchmarks: loads and texts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import DEMO
from vllm_dflash.tools.bench.sides import NO_PLUGIN, side_environment
from vllm_dflash.tools.engine_answers import EngineAnswers
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
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineAnswers]:
    log = Path(tmp_path_factory.mktemp("plain")) / "log"
    with EngineProcess(log, environment=side_environment(NO_PLUGIN), **ARGUMENTS) as process:
        yield process.answers


def test_closed(plain: EngineAnswers) -> None:
    result = plain.closed(prompts=PROMPTS, concurrency=3, tokens=8, seconds=0.3)
    assert result["tokens"] >= 3  # at least one step
    assert result["tokens_per_output"] == 1  # without drafts
    assert result["tokens_per_second"] == pytest.approx(result["tokens"] / result["seconds"])


def test_loads_leave_nothing_behind(plain: EngineAnswers) -> None:
    for _ in range(2):
        assert plain.closed(prompts=PROMPTS, concurrency=2, tokens=4, seconds=0.1)["tokens"] >= 2
        result = plain.answers(prompts=PROMPTS, answers=[4, 9], concurrency=1)
        assert result["tokens"] == 4 + 9
        assert len(result["first_token_seconds"]) == len(result["token_seconds"]) == 2


def test_generate(plain: EngineAnswers) -> None:
    answer = plain.generate(prompts=PROMPTS[:3], tokens=6)
    assert [len(ids) for ids in answer["token_ids"]] == [6, 6, 6]
    assert answer["tokens_per_second"] > 0
    assert answer["counts"] == {}
    # Each prompt gets its own tokens, whichever finishes first.
    one = plain.generate(prompts=PROMPTS[2:3], tokens=3)
    assert one["token_ids"] == [answer["token_ids"][2][:3]]


def test_a_text_step_by_step(plain: EngineAnswers) -> None:
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


def test_messages_go_through_the_chat_template(plain: EngineAnswers) -> None:
    (tokens,) = plain.encode(texts=["What is a keel?"], template={"enable_thinking": False})
    assert "".join(plain.decode(tokens=tokens)) == "What is a keel?\n"  # the demo target's
    (long,) = plain.encode(texts=["a keel " * 600], template={})
    assert len(long) > ARGUMENTS["max_model_len"]  # no check here that it fits
