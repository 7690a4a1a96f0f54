"""Placeholders, and cache blocks that change owners (hazard 5)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_dflash.engine.scheduler_output import fresh_cache_blocks, newly_admitted
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
    step: Any = SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(block_ids=([9], [1, 2, 3]), num_computed_tokens=0),
            SimpleNamespace(block_ids=([9], [4, 5, 6]), num_computed_tokens=64),
            SimpleNamespace(block_ids=([9], [7, 8]), num_computed_tokens=33),  # in mid-block
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=["a", "b", "c"],
            new_block_ids=[None, ([9], [20]), ([9], [30, 31, 32])],
            num_computed_tokens=[5, 64, 32],
            resumed_req_ids={"c"},
        ),
    )
    assert fresh_cache_blocks(step, 1, 32) == [1, 2, 3, 6, 20, 31, 32]


def test_a_step_that_allocates_nothing_has_no_fresh_blocks() -> None:
    """One request goes on, one was found in full blocks, one resumes with all blocks found."""
    step: Any = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(block_ids=([1, 2],), num_computed_tokens=64)],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=["a", "b"],
            new_block_ids=[None, ([3, 4],)],
            num_computed_tokens=[40, 33],  # the second was found in the middle of a block
            resumed_req_ids={"b"},
        ),
    )
    assert fresh_cache_blocks(step, 0, 32) == []


def test_lists_that_do_not_belong_together_are_refused() -> None:
    going_on = SimpleNamespace(
        req_ids=["a"], new_block_ids=[([1],)], num_computed_tokens=[5, 6], resumed_req_ids=set()
    )
    step: Any = SimpleNamespace(scheduled_new_reqs=[], scheduled_cached_reqs=going_on)
    with pytest.raises(ValueError, match="longer than"):
        fresh_cache_blocks(step, 0, 32)


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
