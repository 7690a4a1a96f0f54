"""Second turns find as much in the prefix cache as without drafts, on the emulated GPU.

Drafters have a window on one layer. In hybrid targets blocks are larger beside drafts; plain vLLM
gets such blocks, too, so that all other losses show.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM

from support.engines import FIXED, engine, greedy, scheduler_of
from support.hybrids import kernels_for_prompts, know_qwen35
from support.pairs import drafter_config, save_drafter
from support.targets import make_target

pytestmark = pytest.mark.emulated
# The texts end a few tokens behind 96, 128, 192 and 256: drafts are verified where a block ends.
LENGTHS = 92, 124, 188, 252, 284
PROMPTS = [[(7 * row + 3 * i) % 300 for i in range(n)] for row, n in enumerate(LENGTHS)]
SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_model_len": 512,
    "max_num_seqs": len(LENGTHS),
    "max_num_batched_tokens": 192,
    "kv_cache_memory_bytes": 64 << 20,
    "async_scheduling": True,
}
SAME, DOUBLE, HALF = (
    {"num_attention_heads": 2 * heads, "num_key_value_heads": heads, "head_dim": dim}
    for heads, dim in ((1, 64), (2, 64), (1, 32))
)
"""Shapes of a drafter's layers. Of a token, they keep as much as a layer of the target's, or twice
or half of it."""


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    know_qwen35()
    with kernels_for_prompts():
        yield


def two_turns(llm: LLM) -> tuple[list[int], list[list[int]]]:
    """Return how many tokens of each second turn were in the cache, and the texts of both turns."""
    params = greedy(8, detokenize=False, ignore_eos=True)
    prompts, texts, found = PROMPTS, [], []
    for _ in range(2):
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(requests, params, use_tqdm=False)
        texts += [list(one.outputs[0].token_ids) for one in outputs]
        found = [one.num_cached_tokens for one in outputs]
        prompts = [[*one.prompt_token_ids, *one.outputs[0].token_ids, 7, 8] for one in outputs]
    return found, texts


@pytest.mark.parametrize(
    ("family", "shape", "times"),
    [
        ("llama", SAME, 1),
        *(
            pytest.param(*rare, marks=pytest.mark.slow)
            for rare in (
                ("llama", DOUBLE, 1),
                ("mistral", DOUBLE, 2),
                ("gemma4", SAME, 1),
                ("gemma4", DOUBLE, 2),
                ("qwen3.5", SAME, 1),
                ("qwen3.5", DOUBLE, 2),
                ("qwen3.5", HALF, 2),
            )
        ),
    ],
)
def test_second_turns_find_what_they_find_without_drafts(
    tmp_path: Path, family: str, shape: dict[str, int], times: int
) -> None:
    """Hits end at multiples of so many of the target's blocks."""
    make_target(tmp_path / "target", family)
    windows = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20}
    save_drafter(tmp_path / "drafter", drafter_config(**windows, **shape))
    settings = {**SETTINGS, "model": str(tmp_path / "target")}
    drafts = {**FIXED, "model": str(tmp_path / "drafter")}
    with engine(**settings, block_size=16, speculative_config=drafts) as llm:
        block = scheduler_of(llm).block_size
        assert block == times * llm.llm_engine.vllm_config.cache_config.block_size
        found = two_turns(llm)
        (stats,) = llm.collective_rpc("dflash_stats")
    with engine(**settings, block_size=block) as llm:
        assert scheduler_of(llm).block_size == block
        assert found == two_turns(llm)
    assert found[0][-1] > 0
    assert stats["nan_drafts"] == 0
