"""The lines that say which DFlash runs, and how its draft lengths vary."""

from __future__ import annotations

from typing import Any

import pytest

from support.log_lines import log_lines
from support.pairs import Pair
from vllm_dflash import __version__
from vllm_dflash.config.engine_options import EngineOptions
from vllm_dflash.engine.reporting.log import log_active, log_free_drafts, log_lengths


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
    pair: Pair, draft_length: Any, room: int, nodes: int, said: str
) -> None:
    """Numbers are those that vLLM prints in its own lines."""
    spec = pair.spec.model_copy(update={"model": "someone/its-drafter"})
    with log_lines() as lines:
        log_active(EngineOptions(room, 5, draft_length, spec, tree_nodes=nodes))
    assert lines == [
        f"INFO vllm-dflash {__version__} is active: drafter someone/its-drafter, draft length"
        f" {draft_length} ({said}), runner v1, block size 8, taps: outputs of layers [0, 2],"
        " counted from 0 (vLLM's auxiliary layers (1, 3))"
    ]


def test_free_drafts_have_a_line_of_their_own(pair: Pair) -> None:
    with log_lines() as lines:
        log_free_drafts(EngineOptions(32, 5, "adaptive", pair.spec, most_free=32))
    assert lines == [
        "INFO free drafts: up to 32 tokens of a request's own text, where it repeats itself"
    ]


def test_lengths_are_named_with_what_different_ones_cost() -> None:
    with log_lines() as lines:
        log_lengths([0, 3, 7], 0.00025)
    assert lines == [
        "INFO draft lengths 0, 3, 7 (the same for all requests of a step, or each its own, for"
        " 0.25 ms more)"
    ]
