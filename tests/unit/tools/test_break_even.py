"""`vllm-dflash bench --break-even`: its arguments, its servers, and what it says of their times."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from vllm.platforms import current_platform

pytest.importorskip("matplotlib")

from support import DEMO
from vllm_dflash.tools import cli
from vllm_dflash.tools.bench import bench_runs
from vllm_dflash.tools.bench.bench_runs import Cell, Comparison
from vllm_dflash.tools.bench.break_even import check_steps, verifying_side
from vllm_dflash.tools.bench.rejected_drafts import DRAFTED, RejectedDrafts
from vllm_dflash.tools.bench.sides import CACHE_SIZE, PLAIN, Side

TARGET = str(DEMO / "target")


def bench(out: Path, *arguments: str) -> int:
    return cli.main(["bench", "--out", str(out), "--target", TARGET, *arguments])


def served(requests: int, k: int = 0, steps: int = 10) -> dict[str, Any]:
    """A result of requests whose steps verify K drafts and accept none."""
    drafts = requests * steps if k else 0
    return {
        "completed": requests,
        "total_input_tokens": 100 * requests,
        "total_output_tokens": requests * (1 + steps),
        "spec_decode_num_drafts": drafts,
        "spec_decode_draft_tokens": k * drafts,
        "spec_decode_accepted_tokens": 0,
        "preemptions": 0,
        "cache_tokens": 100_000,
    }


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Cell]]:
    """Record what servers are asked, whose steps take longer by a tenth for each draft."""
    cells: list[tuple[str, Cell]] = []

    def measure(name: Any, cell: Cell, *_: Any) -> dict[str, Any]:
        cells.append((name, cell))
        k = 0 if name == PLAIN else int(name.rpartition("=")[2])
        step = {"step_seconds": 0.02 * (1 + k * cell.concurrency / 10)}
        return served(cell.concurrency, k) | step

    class Name(str):
        facts: ClassVar[dict[str, Any]] = {"versions": {}}

    names = lambda self: nullcontext({side.name: Name(side.name) for side in self.record.sides})  # noqa: E731
    monkeypatch.setattr(Comparison, "_servers", names)
    monkeypatch.setattr(bench_runs, "measure", measure)
    return cells


def test_a_ratio_for_each_number_of_requests_and_context(
    tmp_path: Path, asked: list[tuple[str, Cell]], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--break-even", "7", "3", "--context", "16", "2000", "--concurrency", "1", "8"]
    assert bench(tmp_path, *options, "--rounds", "2") == 0
    printed = capsys.readouterr().out
    lines = [re.split(" {2,}", line.strip()) for line in printed.splitlines()]
    one = ["1", "20.0 ms", "1.30 (1.30 - 1.30)", "1.70 (1.70 - 1.70)"]
    eight = ["8", "20.0 ms", "3.40 (3.40 - 3.40)", "6.60 (6.60 - 6.60)"]
    heads = lines.index(["concurrency", "a plain step", "K=3", "K=7"])
    assert lines[heads + 1 : heads + 3] == [one, eight]
    assert lines.count(one) == lines.count(eight) == 2
    assert "context 2,000: tokens a step must bring" in printed
    assert f"Written: result.json in {tmp_path}, and" in printed
    cells = [cell for name, cell in asked if name == PLAIN]
    assert [(cell.load, cell.concurrency) for cell in cells] == [
        *(("context 16", 1), ("context 16", 8), ("context 2,000", 1), ("context 2,000", 8))
    ] * 3  # and a warm-up round
    flags = " ".join(cells[3].flags)
    assert "--random-input-len 2000 --num-prompts 8" in flags
    assert "--ignore-eos" in flags
    assert "--seed 0" in flags  # the same prompts in every round: they stay cached
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(result["measurements"]) == 2 * 3 * 4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"spec_decode_draft_tokens": 29}, "cannot be compared"),
        ({"spec_decode_accepted_tokens": 1}, "cannot be compared"),
        ({"spec_decode_num_drafts": 5, "spec_decode_draft_tokens": 15}, "cannot be compared"),
        ({"preemptions": 1}, "VLLM_CPU_KVCACHE_SPACE"),
        ({"cache_tokens": 199}, "the KV cache holds 199 tokens"),
    ],
)
def test_steps_that_are_others_than_they_should_be(wrong: dict[str, int], message: str) -> None:
    """Steps of some requests, while others wait or are read again, would be faster or slower."""
    check_steps(verifying_side(3), served(1, 3), kept=200)
    check_steps(Side(PLAIN, "plain", "", None), served(1), kept=200)
    with pytest.raises(ValueError, match=message):
        check_steps(verifying_side(3), served(1, 3) | wrong, kept=200)


def test_the_cache_keeps_the_requests_of_all_measurements(
    tmp_path: Path, comparisons: list[Comparison]
) -> None:
    asked = ["--context", "10", "20", "--concurrency", "1", "4", "--output-len", "6"]
    assert bench(tmp_path, "--break-even", "3", *asked) == 0
    needed = 16 + 26 + 4 * (16 + 26)
    check = comparisons[0].check
    check(verifying_side(3), served(4, 3) | {"cache_tokens": needed})
    with pytest.raises(ValueError, match="have 210"):
        check(verifying_side(3), served(4, 3) | {"cache_tokens": needed - 1})


def test_defaults(
    tmp_path: Path, comparisons: list[Comparison], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(tmp_path, "--break-even", "--context", "2000") == 0
    (comparison,) = comparisons
    names = [side.name for side in comparison.record.sides]
    assert names == ["plain", "verify K=3", "verify K=7", "verify K=15"]
    assert {side.plugins for side in comparison.record.sides} == {""}
    flags = comparison.flags
    assert flags[flags.index("--max-model-len") + 1] == str(2000 + 2 * 96 + 15)
    assert "room for 2,207 tokens: the longest --context" in capsys.readouterr().err
    assert "--no-enable-prefix-caching" not in flags  # prompts of every round are read once
    assert comparison.environment == {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    assert [cell.concurrency for cell in comparison.cells] == [1, 4, 16]


@pytest.mark.skipif(not current_platform.is_cpu(), reason="on a GPU, memory is shared out")
@pytest.mark.parametrize(
    ("space", "given", "expected"), [("1", [], 2 << 30), ("5", [], 5 << 30), ("5", ["9"], 9)]
)
def test_on_cpus_the_cache_has_room_for_the_defaults(
    tmp_path: Path,
    comparisons: list[Comparison],
    monkeypatch: pytest.MonkeyPatch,
    space: str,
    given: list[str],
    expected: int,
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", space)
    asked = ["--", CACHE_SIZE, *given] if given else []
    assert bench(tmp_path, "--break-even", *asked) == 0
    flags = comparisons[0].flags
    assert [two for one, two in pairwise(flags) if one == CACHE_SIZE] == [str(expected)]


def test_gpus_have_vllms_synthetic_acceptance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    config = verifying_side(7).speculative_config
    assert config is not None
    assert config["rejection_sample_method"] == "synthetic"
    assert config["synthetic_acceptance_rates"] == [0.0] * 7


def test_a_target_cannot_write_the_draft() -> None:
    class Target(torch.nn.Module):
        def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
            return None if hidden.isnan().any() else hidden.clone()

    class Config:
        class speculative_config:
            num_speculative_tokens = 3

    target, proposer = Target(), RejectedDrafts(Config)
    proposer.load_model(target)
    logits = target.compute_logits(torch.ones(2, 5))
    assert logits is not None
    assert logits[:, DRAFTED].tolist() == [-float("inf")] * 2
    assert logits[:, 1:].eq(1).all()
    assert target.compute_logits(torch.tensor([torch.nan])) is None
    assert proposer.propose([[4], [], [5]], None, slot_mappings=None) == [[0] * 3, [], [0] * 3]
