"""A restarted engine plans by what the previous one has learned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.engines import (
    DFLASH,
    SCHEDULING,
    engine,
    greedy,
    held_out_prompts,
    token_ids,
    worker_of,
)
from support.log_lines import log_lines
from support.planner_world import MAX_DRAFT, VERIFY_MS, curve
from vllm_dflash.engine import estimates_file
from vllm_dflash.engine.v1.v1_worker import V1CPUWorker
from vllm_dflash.engine.v2.v2_cpu_worker import V2CPUWorker
from vllm_dflash.planning.costs import StepCosts
from vllm_dflash.planning.estimates import Estimates

pytestmark = pytest.mark.usefixtures("runner")
REQUESTS = 4


def profiled(*_: Any) -> StepCosts:
    """Return costs at which drafting is nearly free, so that there are drafts to learn from."""
    almost_free = {1: 0.1, 64: 0.2}
    return StepCosts.of(curve(VERIFY_MS), curve(almost_free), curve(almost_free), REQUESTS)


def costs_before_a_step(llm: Any) -> StepCosts:
    """Return the costs that the planner starts from, in the scheduler or in the worker."""
    if (facts := getattr(worker_of(llm), "_facts_to_send", None)) is not None:
        return facts.costs
    return worker_of(llm).drafter.host.planner.costs


@pytest.mark.parametrize("scheduling", SCHEDULING[-1:])
def test_the_second_start_recalls_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheduling: str
) -> None:
    """It has the same costs to the last digit, without a profile, and writes the same text."""
    monkeypatch.setattr(estimates_file, "LEAST_STEPS", 5)
    folder = tmp_path / "made" / "by us"
    settings = {
        "speculative_config": {**DFLASH, "estimates_folder": str(folder)},
        "max_num_seqs": REQUESTS,
    }
    prompts, params = held_out_prompts(REQUESTS), greedy(60, ignore_eos=True)
    for kind in (V1CPUWorker, V2CPUWorker):
        monkeypatch.setattr(kind, "measure", profiled)
    with log_lines() as first, engine(scheduling, **settings) as llm:
        text = token_ids(llm, prompts, params)
    (path,) = folder.iterdir()
    assert any(f"kept in {path}" in line for line in first)
    written = json.loads(path.read_text())["estimates"]
    known = Estimates.from_dict(written, MAX_DRAFT, REQUESTS)
    assert known.blocks[0].sum() > 0
    assert known.costs.records != profiled().records

    def no_profile(*_: Any) -> None:
        raise AssertionError("it was profiled again")

    for kind in (V1CPUWorker, V2CPUWorker):
        monkeypatch.setattr(kind, "measure", no_profile)
    with log_lines() as second, engine(scheduling, **settings) as llm:
        assert costs_before_a_step(llm).records == known.costs.records
        assert token_ids(llm, prompts, params) == text
    assert any(f"planned from costs learned before, from {path}" in line for line in second)
    assert json.loads(path.read_text())["estimates"] != written
