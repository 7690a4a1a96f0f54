"""What `vllm-dflash bench` refuses before it starts an engine, and how it says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm.platforms import current_platform

pytest.importorskip("matplotlib")

from support import DEMO
from vllm_dflash.tools import cli
from vllm_dflash.tools.bench.comparison import Comparison
from vllm_dflash.tools.console import COULD_NOT_RUN, INTERRUPTED

TARGET = ["--target", str(DEMO / "target")]
NOT_WIDENED = [*TARGET, "--drafter", str(DEMO / "drafter")]
BREAK_EVEN = [*TARGET, "--break-even"]


@pytest.fixture
def one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison finishes one round, and is interrupted in the second."""

    def run(self: Comparison) -> None:
        self.record.finish_round(
            [
                {
                    "load": "closed",
                    "setting": 1,
                    "side": side.name,
                    "result": {"tokens_per_second": 7},
                }
                for side in self.record.sides
            ]
        )
        raise KeyboardInterrupt

    monkeypatch.setattr(Comparison, "run", run)


def bench(tmp_path: Path, *arguments: str) -> int:
    return cli.main(["bench", "--demo", str(DEMO), "--out", str(tmp_path / "out"), *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--demo", "nowhere"], "nowhere"),
        ([*NOT_WIDENED, "--prompts", "nothing.jsonl"], "pass another --prompts"),
        ([*NOT_WIDENED, "--max-num-seqs", "31"], "raise --max-num-seqs"),
        ([*BREAK_EVEN, "--drafter", "a"], "without a drafter: leave out --drafter."),
        ([*BREAK_EVEN, "--beside", "ngram", "--quick"], "leave out --beside, --quick."),
        ([*BREAK_EVEN, "--temperature", "0.7"], "leave out --temperature."),
        ([*BREAK_EVEN, "--concurrency", "65"], "raise --max-num-seqs"),
        ([*TARGET, "--context", "64"], "--context needs --break-even"),
    ],
)
def test_refused_with_the_remedy(
    tmp_path: Path,
    comparisons: list[Comparison],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    assert bench(tmp_path, *arguments) == COULD_NOT_RUN
    assert message in capsys.readouterr().err
    assert not comparisons


def test_an_interrupted_bench_says_what_it_has(
    tmp_path: Path, one_round: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(tmp_path, *NOT_WIDENED, "--native-k", "3") == INTERRUPTED
    printed = capsys.readouterr().out
    assert "closed: tokens/s, median of rounds" in printed
    assert "1 of 5 rounds are complete." in printed
    assert str(tmp_path / "out") in printed


def test_sides_and_defaults(tmp_path: Path, comparisons: list[Comparison]) -> None:
    asked = ["--native-k", "9", "7", "3", "--tensor-parallel-size", "2"]
    assert bench(tmp_path, *NOT_WIDENED, *asked) == 0
    (comparison,) = comparisons
    names = [side.name for side in comparison.record.sides]
    assert names == ["plain", "native K=3", "native K=7", "ours"]
    plain, native, _, ours = comparison.record.sides
    assert plain.speculative_config is None
    assert (plain.plugins, native.plugins, ours.plugins) == ("", "", "dflash")
    of_ours = {"method": "dflash", "model": str(DEMO / "drafter"), "require": True}
    assert ours.speculative_config == of_ours
    assert comparison.workload.loads == ("closed",)
    assert comparison.workload.concurrency == (1, 2, 4, 8, 16, 32)
    assert comparison.record.rounds == 5
    assert comparison.record.about["engine"] == comparison.engines.arguments
    assert not comparison.engines.arguments["enable_prefix_caching"]
    assert comparison.engines.arguments["tensor_parallel_size"] == 2


def test_other_options_of_ours_are_sides(
    tmp_path: Path, comparisons: list[Comparison], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["blocks", '{"draft_window": 64, "free_drafts": "off", "require": false}', "ngram"]
    assert bench(tmp_path, *NOT_WIDENED, "--native-k", "--beside", *asked) == 0
    *_, blocks, alone, ngram = comparisons[0].record.sides
    assert blocks.name == "ours, blocks only"
    assert alone.name == "ours, draft_window 64, free_drafts off, require False"
    assert blocks.speculative_config is not None
    assert alone.speculative_config is not None
    assert alone.speculative_config["draft_window"] == 64
    assert blocks.speculative_config["require"] is True
    assert alone.speculative_config["require"] is False
    assert (blocks.plugins, alone.plugins, ngram.plugins) == ("dflash", "dflash", "")
    for wrong, message in (
        ("both", "none of blocks"),
        ('{"temperature": 1}', "not options of ours"),
    ):
        with pytest.raises(SystemExit):
            bench(tmp_path, *NOT_WIDENED, "--beside", wrong)
        assert message in capsys.readouterr().err


def test_engines_of_one_name_are_refused(
    tmp_path: Path, comparisons: list[Comparison], capsys: pytest.CaptureFixture[str]
) -> None:
    """Engines and results are found by name: one of them would never end."""
    asked = ['{"draft_window": 64}', '{"draft_window": "64"}']
    assert bench(tmp_path, *NOT_WIDENED, "--native-k", "--beside", *asked) == COULD_NOT_RUN
    assert "'ours, draft_window 64' 2 times: leave all but one out" in capsys.readouterr().err
    assert not comparisons


def test_vllms_own_is_left_out_where_it_does_not_run_the_drafter(
    tmp_path: Path, comparisons: list[Comparison]
) -> None:
    pair = ["--target", str(DEMO / "target"), "--drafter", str(DEMO / "drafter2")]
    assert bench(tmp_path, *pair) == 0
    (comparison,) = comparisons
    assert [side.name for side in comparison.record.sides] == ["plain", "ours"]


@pytest.mark.parametrize(("is_cuda", "each"), [(True, 0.8 / 3), (False, None)])
def test_engines_share_a_gpus_memory(
    tmp_path: Path,
    comparisons: list[Comparison],
    monkeypatch: pytest.MonkeyPatch,
    is_cuda: bool,
    each: float | None,
) -> None:
    """Plain, vLLM's own at K = 3, and ours live side by side.

    They start one after the other, since vLLM measures the memory that is free.
    """
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(6))
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _: is_cuda)
    arguments = ["--native-k", "3", "--gpu-memory-utilization", "0.8"]
    assert bench(tmp_path, *NOT_WIDENED, *arguments) == 0
    assert comparisons[0].engines.arguments.get("gpu_memory_utilization") == each
    assert comparisons[0].engines.at_once == (1 if is_cuda else 6)
    assert bench(tmp_path, *NOT_WIDENED, "--kv-cache-memory-bytes", "1000") == 0
    assert comparisons[1].engines.arguments["kv_cache_memory_bytes"] == 1000
    assert comparisons[1].engines.at_once == 6
