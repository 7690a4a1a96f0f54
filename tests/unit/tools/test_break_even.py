"""`vllm-dflash bench --break-even`: its arguments, its engines, and what it says of their times."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform

from support import DEMO
from support.instant_engines import Question, of, recording_processes
from vllm_dflash.tools import cli
from vllm_dflash.tools.bench import sides
from vllm_dflash.tools.bench.break_even import verifying_side
from vllm_dflash.tools.bench.comparison import Comparison
from vllm_dflash.tools.bench.rejected_drafts import DRAFTED, RejectedDrafts
from vllm_dflash.tools.bench.step_answers import StepAnswers, check_drafts
from vllm_dflash.tools.stepped_engine import Output

TARGET = str(DEMO / "target")


def bench(out: Path, *arguments: str) -> int:
    return cli.main(["bench", "--out", str(out), "--target", TARGET, *arguments])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Question]:
    """Record what engines are asked, whose steps take longer by a tenth for each draft."""
    questions: list[Question] = []

    def steps(asked: dict[str, Any]) -> dict[str, Any]:
        name, *_ = questions[-1]
        k = 0 if name == "plain" else int(name.rpartition("=")[2])
        return {"steps": 10, "step_seconds": 0.02 * (1 + k * asked["concurrency"] / 10)}

    monkeypatch.setattr(sides, "EngineProcess", recording_processes(questions, {"steps": steps}))
    return questions


def test_a_ratio_for_each_number_of_requests_and_context(
    tmp_path: Path, asked: list[Question], capsys: pytest.CaptureFixture[str]
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
    assert f"Written: result.json and result.md in {tmp_path}\n" in printed
    questions = [arguments for name, _, arguments in of(asked, "steps") if name == "plain"]
    assert [(one["context"], one["concurrency"]) for one in questions] == [
        *((16, 1), (16, 8), (2000, 1), (2000, 8))
    ] * 3  # and a warm-up round
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(result["measurements"]) == 2 * 3 * 4
    assert "## context 16: tokens a step must bring" in (tmp_path / "result.md").read_text()


@pytest.mark.parametrize("wrong", [{"draft_tokens": 29.0}, {"accepted_tokens": 1.0}, {}])
def test_steps_that_verified_something_else_are_refused(wrong: dict[str, float]) -> None:
    right = {"drafts": 10.0, "draft_tokens": 30.0, "accepted_tokens": 0.0}
    check_drafts(right, 30)
    check_drafts({}, 0)  # of an engine that does not draft
    with pytest.raises(ValueError, match="cannot be compared"):
        check_drafts(wrong and right | wrong, 30)


class OneWaits(StepAnswers):
    """An engine whose second request is served once, and then waits."""

    def __init__(self) -> None:
        config = SimpleNamespace(max_model_len=64, num_speculative_tokens=0)
        engine: Any = SimpleNamespace(model_config=config, vllm_config=config)
        super().__init__(engine)
        self.prompts: list[list[int]] = []
        self.served = "01"

    def encode(self, *_: Any) -> list[list[int]]:
        return [[5, 6, 7]]

    def counts(self) -> dict[str, float]:
        return {}

    def add(self, request_id: str, prompt: Any, max_tokens: int, **_: Any) -> None:
        assert max_tokens == 64 - len(prompt)
        self.prompts.append(prompt)

    def step(self) -> list[Output]:
        served, self.served = self.served, "0"
        return [Output(request_id, [8], finished=False) for request_id in served]


def test_requests_that_wait_are_refused() -> None:
    """Steps of the others are faster than steps of all."""
    engine = OneWaits()
    with pytest.raises(ValueError, match="1 of 2 decode"):
        engine.steps(["some text"], context=4, concurrency=2, tokens=9, seconds=60.0)
    assert engine.prompts == [[1, 6, 7, 5], [2, 7, 5, 6]]


def test_defaults(
    tmp_path: Path, comparisons: list[Comparison], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(tmp_path, "--break-even", "--context", "2000") == 0
    (comparison,) = comparisons
    names = [side.name for side in comparison.record.sides]
    assert names == ["plain", "verify K=3", "verify K=7", "verify K=15"]
    assert {side.plugins for side in comparison.record.sides} == {""}
    arguments = comparison.engines.arguments
    assert arguments["max_model_len"] == 2000 + 2 * 96 + 15
    assert "room for 2,207 tokens: the longest --context" in capsys.readouterr().err
    assert "enable_prefix_caching" not in arguments  # prompts of every round are read once
    assert comparison.workload.concurrency == (1, 4, 16)
    assert comparison.workload.seconds_of_round == 3 * 2.0


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
