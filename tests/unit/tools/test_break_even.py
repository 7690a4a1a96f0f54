"""`vllm-dflash bench --break-even`: its arguments, its servers, and what it says of their times."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform

from support import DEMO
from vllm_dflash.tools import cli
from vllm_dflash.tools.bench.bench_runs import Cell, Comparison
from vllm_dflash.tools.bench.break_even import check_drafts, measure_steps, verifying_side
from vllm_dflash.tools.bench.rejected_drafts import DRAFTED, RejectedDrafts
from vllm_dflash.tools.bench.sides import PLAIN, SideServers

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
    }


class NoServers(SideServers):
    def start(self, *_: Any) -> list[Any]:
        return []

    def __getitem__(self, name: str) -> Any:
        return name


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Cell]]:
    """Record what servers are asked, whose steps take longer by a tenth for each draft."""
    cells: list[tuple[str, Cell]] = []

    def measure(name: Any, cell: Cell, *_: Any) -> dict[str, Any]:
        cells.append((name, cell))
        k = 0 if name == PLAIN else int(name.rpartition("=")[2])
        step = {"step_seconds": 0.02 * (1 + k * cell.concurrency / 10)}
        return served(cell.concurrency, k) | step

    run = Comparison.run

    def without_servers(self: Comparison) -> None:
        self.servers.__class__, self.measure = NoServers, measure
        run(self)

    monkeypatch.setattr(Comparison, "run", without_servers)
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
    assert f"Written: result.json, result.md in {tmp_path}\n" in printed
    cells = [cell for name, cell in asked if name == PLAIN]
    assert [(cell.load, cell.concurrency) for cell in cells] == [
        *(("context 16", 1), ("context 16", 8), ("context 2,000", 1), ("context 2,000", 8))
    ] * 3  # and a warm-up round
    flags = " ".join(cells[3].flags)
    assert "--random-input-len 2000 --num-prompts 8" in flags
    assert "--ignore-eos --seed 0" in flags  # the same prompts in every round: they stay cached
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(result["measurements"]) == 2 * 3 * 4
    assert "## context 16: tokens a step must bring" in (tmp_path / "result.md").read_text()


class CountingServer:
    """A server that has answered 5 requests, and answers 2 more, with room for some tokens."""

    def __init__(self, cache_tokens: int, preempted: int) -> None:
        self._cache_tokens, self._preempted = cache_tokens, preempted
        self._seconds, self._count = 9.0, 5

    def serve(self, *_: Any) -> dict[str, Any]:
        self._seconds, self._count = 9.5, 7
        return served(2)

    def ask(self, path: str) -> dict[str, int]:
        return {"cache_tokens": self._cache_tokens}

    def answer(self, path: str) -> Any:
        name = "vllm:request_time_per_output_token_seconds"
        preempted = self._preempted if self._count > 5 else 0
        lines = [f"# TYPE {name} histogram", f"{name}_sum {self._seconds}"]
        lines += [f"{name}_count {self._count}", f"vllm:num_preemptions_total {preempted}"]
        return nullcontext(BytesIO("\n".join(lines).encode() + b"\n"))


@pytest.mark.parametrize(
    ("cache_tokens", "preempted", "fits"), [(222, 0, True), (221, 0, False), (222, 1, False)]
)
def test_a_step_takes_as_long_as_the_engine_says_if_none_waits(
    monkeypatch: pytest.MonkeyPatch, cache_tokens: int, preempted: int, fits: bool
) -> None:
    """Steps of some requests, while others wait, are faster than steps of all."""
    server: Any = CountingServer(cache_tokens, preempted)
    monkeypatch.setattr("vllm_dflash.tools.bench.break_even.measure", server.serve)
    cell = Cell("context 100", 2, ())
    if fits:
        assert measure_steps(server, cell, 0, Path())["step_seconds"] == 0.25
        return
    with pytest.raises(ValueError, match=r"does not hold all 2 requests.*VLLM_CPU_KVCACHE_SPACE"):
        measure_steps(server, cell, 0, Path())


@pytest.mark.parametrize(
    "wrong", [{"draft_tokens": 29}, {"accepted_tokens": 1}, {"num_drafts": 5, "draft_tokens": 15}]
)
def test_steps_that_verified_something_else_are_refused(wrong: dict[str, int]) -> None:
    right = served(1, 3)
    check_drafts(right, 3)
    check_drafts({"total_output_tokens": 11, "completed": 1}, 0)  # of a server that does not draft
    with pytest.raises(ValueError, match="cannot be compared"):
        check_drafts(right | {f"spec_decode_{name}": value for name, value in wrong.items()}, 3)


def test_defaults(
    tmp_path: Path, comparisons: list[Comparison], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(tmp_path, "--break-even", "--context", "2000") == 0
    (comparison,) = comparisons
    names = [side.name for side in comparison.record.sides]
    assert names == ["plain", "verify K=3", "verify K=7", "verify K=15"]
    assert {side.plugins for side in comparison.record.sides} == {""}
    flags = comparison.servers.flags
    assert flags[flags.index("--max-model-len") + 1] == str(2000 + 2 * 96 + 15)
    assert "room for 2,207 tokens: the longest --context" in capsys.readouterr().err
    assert "--no-enable-prefix-caching" not in flags  # prompts of every round are read once
    assert comparison.servers.environment == {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    assert [cell.concurrency for cell in comparison.cells] == [1, 4, 16]


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
