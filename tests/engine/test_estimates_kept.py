"""An engine that is started again plans by what the one before it has learned."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from support.engines import (
    DFLASH,
    SCHEDULING,
    engine,
    fix_costs,
    greedy,
    held_out_prompts,
    token_ids,
    worker_of,
)
from support.log_lines import log_lines
from vllm_dflash.engine import estimates_file, worker

pytestmark = pytest.mark.usefixtures("runner")
REQUESTS = 4


def learner_of(llm: Any, scheduling: str) -> Any:
    """Who plans."""
    if scheduling == "asynchronous":
        return llm.llm_engine.engine_core.engine_core.scheduler.lengths
    return worker_of(llm).drafter.lengths.policy


@pytest.mark.parametrize("scheduling", SCHEDULING)
def test_the_second_start_recalls_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheduling: str
) -> None:
    """Its costs to the last digit, without a profile; and the text is the same."""
    fix_costs(monkeypatch)
    monkeypatch.setattr(estimates_file, "LEAST_STEPS", 5)
    folder = tmp_path / "made" / "by us"
    settings = {
        "speculative_config": {**DFLASH, "estimates_folder": str(folder)},
        "max_num_seqs": REQUESTS,
    }
    prompts, params = held_out_prompts(REQUESTS), greedy(60, ignore_eos=True)
    with log_lines() as first, engine(scheduling, **settings) as llm:
        text = token_ids(llm, prompts, params)
    (path,) = folder.iterdir()
    assert any(f"goes to {path}" in line for line in first)
    written = json.loads(path.read_text())["estimates"]
    assert sum(map(sum, written["seen"])) > 10

    def no_profile(*_: Any) -> None:
        raise AssertionError("it was profiled again")

    for profile in ("profile_v1", "profile_v2"):
        monkeypatch.setattr(worker, profile, no_profile)
    with log_lines() as second, engine(scheduling, **settings) as llm:
        started_from = worker_of(llm)._keeper or worker_of(llm)._facts_to_send.memory
        recalled = getattr(started_from, "recalled", None) or learner_of(llm, scheduling).estimates()
        assert recalled.to_dict()["costs"] == written["costs"]
        assert token_ids(llm, prompts, params) == text
        assert learner_of(llm, scheduling).survival
    assert any(f"planned from costs learned before, from {path}" in line for line in second)
