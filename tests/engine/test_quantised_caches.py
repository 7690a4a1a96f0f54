"""An 8-bit KV cache: the text is the target's own with such a cache, whatever the drafter's."""

from __future__ import annotations

from itertools import chain

import pytest
import torch

from support.engines import (
    DRAFTER,
    FIXED,
    TARGET,
    USES_V2,
    drafter_cache_per_token,
    engine,
    greedy,
    held_out_prompts,
    proposer_of,
    slow_on_v2,
    token_ids,
)
from vllm_dflash.tools.inspect.inspect_pair import inspect_pair

pytestmark = [
    pytest.mark.usefixtures("runner"),
    pytest.mark.skipif(
        not torch.cpu._is_avx512_supported(), reason="vLLM: FP8 KV cache on CPU requires AVX-512"
    ),
]
PROMPTS, PARAMS = held_out_prompts(8)[4:], greedy(24)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with engine(kv_cache_dtype="fp8") as llm:
        return token_ids(llm, PROMPTS, PARAMS)


@pytest.mark.parametrize(
    ("drafters", "kept"),
    [
        pytest.param(None, torch.uint8, id="8-bit"),
        pytest.param("auto", torch.float32, id="float32", marks=slow_on_v2),
    ],
)
def test_the_targets_own_text(
    expected: list[list[int]], drafters: str | None, kept: torch.dtype
) -> None:
    """A token of the drafter's also takes as many bytes as `inspect` says."""
    found = inspect_pair(
        str(DRAFTER),
        str(TARGET),
        kv_cache_dtype="fp8",
        draft_kv_cache_dtype=drafters,
        dtype="float32",
        max_model_len=512,
    )
    assert found.memory is not None
    speculative = {**FIXED, "kv_cache_dtype": drafters}
    with engine(speculative_config=speculative, kv_cache_dtype="fp8") as llm:
        assert token_ids(llm, PROMPTS, PARAMS) == expected
        attentions = proposer_of(llm).model.context.attentions
        for attention in attentions:
            assert attention.attn.kv_cache.dtype == kept
        assert found.memory.drafter_cache_per_token == drafter_cache_per_token(llm)
        drafter = proposer_of(llm)
        groups = [*chain(*drafter.attn_groups)] if USES_V2 else drafter.block.groups
        assert {g.get_metadata_builder().kv_cache_dtype for g in groups} == {drafters or "fp8"}
        (stats,) = llm.collective_rpc("dflash_stats")
    assert stats["mean_acceptance_length"] > 2.0
    assert stats["nan_drafts"] == 0
