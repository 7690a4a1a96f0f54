"""Placeholders, and cache blocks that change owners (hazard 5)."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.configs_by_hand import QWEN
from vllm_dflash.checkpoint.read import parse_config
from vllm_dflash.config.engine_options import ADDITIONAL_CONFIG_KEY, EngineOptions
from vllm_dflash.engine.scheduler_output import (
    batch_too_small_warning,
    fresh_cache_blocks,
    newly_admitted,
)
from vllm_dflash.engine.v1.backlog import useless_cache_blocks
from vllm_dflash.engine.vllm_fixes.stale_blocks import clear_blocks


def test_new_and_resumed_requests_have_no_drafts_yet() -> None:
    new = [SimpleNamespace(req_id=name) for name in "ab"]
    going_on = SimpleNamespace(resumed_req_ids={"c"})
    step: Any = SimpleNamespace(scheduled_new_reqs=new, scheduled_cached_reqs=going_on)
    assert newly_admitted(step) == {"a", "b", "c"}
    step.scheduled_new_reqs, going_on.resumed_req_ids = [], set()
    assert newly_admitted(step) == set()


def test_fresh_blocks_are_those_without_a_cached_prefix() -> None:
    """One new request and one that resumes were found in blocks that they have already."""
    step: Any = SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(block_ids=([9], [1, 2, 3]), num_computed_tokens=0),
            SimpleNamespace(block_ids=([9], [4, 5, 6]), num_computed_tokens=64),
            SimpleNamespace(block_ids=([9], [7, 8]), num_computed_tokens=33),  # in mid-block
            SimpleNamespace(block_ids=([9], [10, 11]), num_computed_tokens=64),
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=["a", "b", "c", "d"],
            new_block_ids=[None, ([9], [20]), ([9], [30, 31, 32]), ([9], [40, 41])],
            num_computed_tokens=[5, 64, 32, 33],
            resumed_req_ids={"c", "d"},
        ),
    )
    assert fresh_cache_blocks(step, 1, 32) == [1, 2, 3, 6, 20, 31, 32]


def test_clearing_spares_all_other_blocks() -> None:
    """Also if the kernel's blocks are half as large as the scheduler's."""
    cache = torch.full((10, 2, 4), float("nan"))
    clear_blocks([cache], 5, [1, 4])
    assert (cache == 0).all(dim=(1, 2)).tolist() == [i // 2 in (1, 4) for i in range(10)]


def test_blocks_of_ended_requests_that_no_prefix_can_be_found_in() -> None:
    """The last token was never computed, so 64 tokens fill one block of 32, and 65 fill two."""
    ended: list[Any] = [
        SimpleNamespace(block_ids=([9], [1, 2]), num_tokens=64),
        SimpleNamespace(block_ids=([9], [3, 4, 5]), num_tokens=65),
        SimpleNamespace(block_ids=([9], [6]), num_tokens=3),
    ]
    assert useless_cache_blocks(ended, 1, 32, caches_prefixes=True) == [2, 5, 6]
    assert useless_cache_blocks(ended, 1, 32, caches_prefixes=False) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("rows", "requests", "level", "said"),
    [
        (8, 2, logging.WARNING, "so no draft is ever verified: raise it to 15 at least."),
        (9, 1, None, ""),
        (9, 2, logging.INFO, "max_num_batched_tokens is 9: a step has room for 1 of up to 2"),
        (16, 2, None, ""),
        (2048, 256, None, ""),
        (2040, 256, logging.INFO, "room for 255 of up to 256 requests"),
    ],
)
def test_few_rows_are_said(rows: int, requests: int, level: int | None, said: str) -> None:
    """K = 7. A step of `rows` reserves 7 for each request, which has one row of its own."""
    options = EngineOptions(32, 7, "adaptive", parse_config("it", QWEN), most_free=32)
    config: Any = SimpleNamespace(
        additional_config={ADDITIONAL_CONFIG_KEY: options.to_json()},
        scheduler_config=SimpleNamespace(max_num_batched_tokens=rows, max_num_seqs=requests),
        speculative_config=SimpleNamespace(max_num_new_slots_for_drafting=7),
    )
    found = batch_too_small_warning(config)
    assert (found and found[0]) == level
    assert said in (found[1] if found else "")
    config.speculative_config.max_num_new_slots_for_drafting = 0  # as in vLLM 0.33
    assert batch_too_small_warning(config) is None
