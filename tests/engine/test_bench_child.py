"""A child with a real engine: what the loads get from it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support import DEMO
from vllm_dflash.tools.bench.bench_engine import BenchChild
from vllm_dflash.tools.bench.bench_prompts import read_prompts

PROMPTS = read_prompts(DEMO / "held_out.jsonl", 8)


@pytest.fixture(scope="module")
def child(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BenchChild]:
    log = Path(tmp_path_factory.mktemp("child")) / "child.log"
    arguments = {"model": str(DEMO / "target"), "max_model_len": 512, "enforce_eager": True}
    arguments["disable_log_stats"] = False  # for `generate`
    with BenchChild(log, plugins="", **arguments) as child:
        yield child


def test_closed(child: BenchChild) -> None:
    result = child.ask("closed", prompts=PROMPTS, concurrency=3, tokens=8, seconds=0.3)
    assert result["tokens"] > 20
    assert result["tokens_per_output"] == 1  # nothing drafts
    assert result["tokens_per_second"] == pytest.approx(result["tokens"] / result["seconds"])


def test_loads_leave_nothing_behind(child: BenchChild) -> None:
    for _ in range(2):
        result = child.ask("swing", prompts=PROMPTS, phases=[(4, 40), (1, 10)], tokens=16)
        assert len(result["seconds"]) == 2
        result = child.ask("poisson", prompts=PROMPTS, arrivals=[0.0, 0.1], tokens=4)
        assert all(
            0 < first < last
            for first, last in zip(result["to_first_token"], result["to_last_token"], strict=True)
        )


def test_generate(child: BenchChild) -> None:
    sampling = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
    answer = child.ask("generate", prompts=PROMPTS[:3], sampling=sampling)
    assert [len(ids) for ids in answer["token_ids"]] == [6, 6, 6]
