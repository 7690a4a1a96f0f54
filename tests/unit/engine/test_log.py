"""The lines that say which DFlash runs, and how its draft lengths vary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.log_lines import log_lines
from support.pairs import make_pair
from support.planner_world import profiled_costs
from vllm_dflash import __version__
from vllm_dflash.config.mode import Mode
from vllm_dflash.engine.reporting.log import log_active, log_free_drafts
from vllm_dflash.engine.v2.exchange import WorkerFacts, log_lengths


@pytest.mark.parametrize(
    ("draft_length", "room", "nodes", "said"),
    [
        ("adaptive", 5, 0, "up to 5 tokens a step"),
        ("adaptive", 32, 0, "up to 5 tokens a step; with free drafts 32, vLLM's num_spec_tokens"),
        ("fixed", 31, 31, "5 tokens a step; with a draft tree 31, vLLM's num_spec_tokens"),
        ("fixed", 5, 0, "5 tokens a step"),
    ],
)
def test_the_start_line_names_drafter_and_draft_length(
    tmp_path: Path, draft_length: Any, room: int, nodes: int, said: str
) -> None:
    """Numbers are those that vLLM prints in its own lines."""
    spec = make_pair(tmp_path).spec.model_copy(update={"model": "someone/its-drafter"})
    with log_lines() as lines:
        log_active(Mode(room, 5, draft_length, spec, tree_nodes=nodes))
    assert lines == [
        f"INFO vllm-dflash {__version__} is active: drafter someone/its-drafter, draft length"
        f" {draft_length} ({said}), runner v1, block size 8, taps: outputs of layers [0, 2],"
        " counted from 0 (vLLM's auxiliary layers (1, 3))"
    ]


def test_free_drafts_have_a_line_of_their_own(tmp_path: Path) -> None:
    spec = make_pair(tmp_path).spec
    with log_lines() as lines:
        log_free_drafts(Mode(32, 5, "adaptive", spec, most_free=32))
    assert lines == [
        "INFO free drafts: up to 32 tokens of a request's own text, where it repeats itself"
    ]


@pytest.mark.parametrize(("runner", "is_said"), [("v1", True), ("v2", False)])
def test_why_free_drafts_are_short_is_said_where_they_need_not_be(
    tmp_path: Path, runner: Any, is_said: bool
) -> None:
    spec = make_pair(tmp_path).spec
    with log_lines() as lines:
        log_free_drafts(Mode(3, 3, "adaptive", spec, most_free=3, runner=runner))
    assert "free drafts: up to 3 tokens" in lines[0]
    assert ("Up to 32 without num_speculative_tokens, LoRA" in lines[0]) is is_said


def test_how_draft_lengths_vary() -> None:
    costs = profiled_costs()
    with log_lines() as lines:
        log_lengths(WorkerFacts(costs, [0, 15], trims=True), None)
        facts = WorkerFacts(costs, [0, 4, 8, 15], ragged_seconds=0.00123)
        log_lengths(facts, "SOME_BACKEND has no graphs")
    assert lines == [
        "INFO draft lengths 0, 15 (for all requests; vLLM's adaptive verification then trims each"
        " request's drafts)",
        "INFO draft lengths 0, 4, 8, 15 (the same for all requests of a step, or each its own, for"
        " 1.23 ms more; adaptive verification is off: SOME_BACKEND has no graphs)",
    ]
