"""What only a GPU shows: captured graphs, asynchronous scheduling, CUDA's attention backends.

pytest tests/engine/test_cuda.py, with the `cuda` extra installed.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from vllm.platforms import current_platform

from support.engines import DFLASH, FIXED, engine, greedy, held_out_prompts, token_ids
from support.pairs import make_pair

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and current_platform.is_cuda()),
        reason="needs a GPU and vLLM's CUDA build",
    ),
]
PROMPTS = held_out_prompts(24)
NEW_TOKENS = 64
GRAPHS = {"enforce_eager": False, "max_num_seqs": 8, "max_num_batched_tokens": 256}


@pytest.fixture(scope="module")
def plain() -> Iterator[list[list[int]]]:
    with engine(**GRAPHS) as llm:
        yield token_ids(llm, PROMPTS, greedy(NEW_TOKENS))


@pytest.mark.parametrize(
    "options",
    [
        FIXED,
        DFLASH,
        {**DFLASH, "enable_adaptive_verification": False},
    ],
    ids=["fixed", "adaptive verification", "one length a step"],
)
@pytest.mark.parametrize("is_async", [True, False], ids=["asynchronous", "synchronous"])
def test_hazard_10_output_is_identical_and_nothing_is_captured_after_warm_up(
    plain: list[list[int]], options: dict[str, object], is_async: bool
) -> None:
    """With graphs: whatever the lengths, no capture and no buffer that moves."""
    with engine(speculative_config=dict(options), async_scheduling=is_async, **GRAPHS) as llm:
        for batch in (1, 3, 8, 24):
            assert token_ids(llm, PROMPTS[:batch], greedy(NEW_TOKENS)) == plain[:batch]
        (stats,) = llm.collective_rpc("dflash_stats")
    assert stats["runner"] == "v2"
    assert stats["captures_after_warmup"] == 0
    assert stats["reallocations_after_warmup"] == 0
    assert stats["accepted_tokens"] > 0


@pytest.mark.parametrize("draft_length", ["fixed", "adaptive"])
def test_draft_trees_in_graphs(plain: list[list[int]], draft_length: str) -> None:
    """Graphs of decoding batches hold our kernel, whatever comes: trees, chains, short prompts."""
    asked = {**DFLASH, "draft_length": draft_length, "draft_tree": 15}
    with engine(speculative_config=asked, async_scheduling=False, **GRAPHS) as llm:
        for batch in (1, 3, 8, 24):
            assert token_ids(llm, PROMPTS[:batch], greedy(NEW_TOKENS)) == plain[:batch]
        (stats,) = llm.collective_rpc("dflash_stats")
    assert stats["captures_after_warmup"] == stats["reallocations_after_warmup"] == 0
    assert stats["tree_nodes"] > 0 or draft_length == "adaptive"


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "FLASHINFER"])
def test_mixed_windows_on_each_attention_backend(tmp_path: Path, backend: str) -> None:
    """Windows, causality and a context several times the window, in the drafter's dtype."""
    pair = make_pair(
        tmp_path,
        head_dim=64,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=32,
    )
    prompts = [{"prompt_token_ids": [(7 * r + 3 * i) % 300 for i in range(120)]} for r in range(4)]
    settings = {"model": str(pair.target), "skip_tokenizer_init": True, "max_model_len": 256}
    settings |= {"dtype": "bfloat16", "block_size": 16}
    speculative = {**FIXED, "model": str(pair.drafter), "attention_backend": backend}
    params = greedy(32, detokenize=False, ignore_eos=True)
    with engine(**settings, speculative_config=speculative) as llm:
        token_ids(llm, prompts, params)
        (stats,) = llm.collective_rpc("dflash_stats")
    assert stats["nan_drafts"] == 0
    assert stats["draft_tokens"] > 0
