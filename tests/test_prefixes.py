"""Cached prefixes and chunks: the drafter's context is there, whatever brought it there."""

from __future__ import annotations

import pytest
from engines import FIXED, engine, greedy, held_out_prompts, prefix_cache_hits, tokens_by_step
from vllm import LLM

pytestmark = pytest.mark.engine
PARAMS = greedy(24, ignore_eos=True)
PROMPTS = held_out_prompts(6)
SHARED = [PROMPTS[5] + ending for ending in ("\n\n", "\n    x = ", "\n    return ", " ")]


def exhaust(llm: LLM) -> None:
    """Fill a small cache with other prefixes."""
    tokens_by_step(llm, held_out_prompts(16)[8:], PARAMS)


def traffic(llm: LLM) -> dict[str, tuple[list[list[int]], int]]:
    """Tokens of each step, and prefix hits, of one batch after another."""
    found = {}

    def serve(name: str, prompts: list[str]) -> None:
        before = prefix_cache_hits(llm)
        steps = tokens_by_step(llm, prompts, PARAMS)
        found[name] = steps, prefix_cache_hits(llm) - before

    serve("cold", PROMPTS[:3])
    serve("cached", PROMPTS[:3])
    serve("cached, alone", PROMPTS[1:2])
    exhaust(llm)
    serve("evicted", PROMPTS[:3])
    assert llm.reset_prefix_cache()
    serve("reset", PROMPTS[:3])
    serve("shared, cold", SHARED)
    serve("shared, cached", SHARED)
    return found


def test_prefix_hits_are_plain_ones_and_bring_context() -> None:
    """Hazard 1: a second request accepts in every step what the first one did."""
    cache = {"num_gpu_blocks_override": 32, "max_model_len": 256, "max_num_seqs": 4}
    with engine(**cache) as llm:
        plain = traffic(llm)
    with engine(**cache, speculative_config=dict(FIXED)) as llm:
        ours = traffic(llm)
        (stats,) = llm.collective_rpc("dflash_stats")
    hits = {name: count for name, (_, count) in ours.items()}
    # Eviction goes by blocks taken, and drafts take some; all else is as in plain vLLM.
    same = [name for name in plain if name != "evicted"]
    assert {name: hits[name] for name in same} == {name: plain[name][1] for name in same}
    assert hits["cold"] == hits["reset"] == 0 < hits["cached"]
    assert hits["evicted"] < hits["cached"]
    assert hits["shared, cached"] > hits["shared, cold"]
    steps = {name: one for name, (one, _) in ours.items()}
    for name in ("cached", "evicted", "reset"):
        assert steps[name] == steps["cold"], name
    assert steps["cached, alone"] == steps["cold"][1:2]
    assert steps["shared, cached"] == steps["shared, cold"]
    assert stats["mean_acceptance_length"] > 1.5
    assert stats["nan_drafts"] == 0


def test_chunks_of_any_size_accept_the_same() -> None:
    """Hazard 2: chunks that sample nothing store their context, wherever they end."""
    with engine(speculative_config=dict(FIXED), enable_prefix_caching=False) as llm:
        whole = tokens_by_step(llm, PROMPTS[:2], PARAMS)
        (before,) = llm.collective_rpc("dflash_stats")
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        for size in (8, 11, 31, 32, 33):  # less than 8 would cut the verified drafts as well
            scheduler.scheduler_config.long_prefill_token_threshold = size
            assert tokens_by_step(llm, PROMPTS[:2], PARAMS) == whole, size
        (stats,) = llm.collective_rpc("dflash_stats")
    assert stats["steps"] > 6 * before["steps"] + 10  # there were chunks
    assert max(map(max, whole)) > 3
    assert stats["nan_drafts"] == 0
