"""Hazard 5 on the real engine: what earlier owners left in cache blocks changes nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from engines import FIXED, engine, greedy, held_out_prompts, proposer_of, token_ids
from vllm import LLM

from vllm_dflash.runner.fresh_blocks import clear_blocks, fresh_blocks

PROMPTS = held_out_prompts(6)
PARAMS = greedy(40, ignore_eos=True)


def poison(llm: LLM, *, target: bool) -> None:
    """Fill every block of the drafter's cache, or of the target's, with NaN."""
    proposer = proposer_of(llm)
    layers = proposer.vllm_config.compilation_config.static_forward_context
    drafters = {attention.attn.layer_name for attention in proposer.model.context.attentions}
    for name, layer in layers.items():
        if (name in drafters) != target and layer.kv_cache.numel():
            layer.kv_cache.fill_(float("nan"))


@pytest.mark.engine
def test_no_draft_changes_where_the_drafters_cache_was_poisoned() -> None:
    """Before the first request, and between batches, when all blocks are free."""
    with engine() as llm:
        expected = token_ids(llm, PROMPTS, PARAMS)
    counted = []
    with engine(
        speculative_config=dict(FIXED), max_num_batched_tokens=64, enable_prefix_caching=False
    ) as llm:
        for poisoned in (False, True, True):
            if poisoned:
                poison(llm, target=False)
            (before,) = llm.collective_rpc("dflash_stats")
            assert token_ids(llm, PROMPTS, PARAMS) == expected
            (after,) = llm.collective_rpc("dflash_stats")
            counted.append(after["accepted_tokens"] - before["accepted_tokens"])
            assert after["nan_drafts"] == 0
    assert counted[0] == counted[1] == counted[2] > 0


@pytest.mark.engine
def test_a_poisoned_target_is_vllms_own_affair() -> None:
    """Its attention reads the end of the last block: plain vLLM writes token 0, and so do we."""
    written = []
    for speculative in (None, dict(FIXED)):
        with engine(speculative_config=speculative, enable_prefix_caching=False) as llm:
            runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
            layers = runner.vllm_config.compilation_config.static_forward_context
            for layer in layers.values():
                layer.kv_cache.fill_(float("nan"))
            written.append(token_ids(llm, PROMPTS[:2], greedy(4, ignore_eos=True)))
            if speculative:
                (stats,) = llm.collective_rpc("dflash_stats")
    assert written[0] == written[1] == [[0] * 4] * 2
    assert stats["draft_tokens"] == 0
    assert stats["nan_drafts"] > 0


def test_fresh_blocks_are_those_without_a_cached_prefix() -> None:
    step = SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(block_ids=([9], [1, 2, 3]), num_computed_tokens=0),
            SimpleNamespace(block_ids=([9], [4, 5, 6]), num_computed_tokens=64),
            SimpleNamespace(block_ids=([9], [7, 8]), num_computed_tokens=33),  # in the middle
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=["a", "b", "c"],
            new_block_ids=[None, ([9], [20]), ([9], [30, 31, 32])],
            num_computed_tokens=[5, 64, 32],
            resumed_req_ids={"c"},
        ),
    )
    assert fresh_blocks(step, 1, 32) == [1, 2, 3, 6, 20, 31, 32]  # type: ignore[arg-type]


def test_clearing_spares_all_other_blocks() -> None:
    """Also where the kernel's blocks are half as large as the scheduler's."""
    cache = torch.full((10, 2, 4), float("nan"))
    clear_blocks([cache], 5, [1, 4])
    assert (cache == 0).all(dim=(1, 2)).tolist() == [i // 2 in (1, 4) for i in range(10)]
