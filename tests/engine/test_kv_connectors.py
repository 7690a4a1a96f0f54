"""Prompts whose K/V another engine computed, and that a connector of vLLM brings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

from support.engines import FIXED, engine, held_out_prompts

pytestmark = pytest.mark.engine
PROMPTS = [prompt * 2 for prompt in held_out_prompts(6)]
"""Prompts of 3 to 7 blocks of the cache."""
HITS = ("hits", "queries")
ACCEPTED = ("spec_decode_num_accepted_tokens", "spec_decode_num_drafts")
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def texts(llm: LLM, tokens: int) -> list[list[int]]:
    answers = llm.generate(PROMPTS, SamplingParams(max_tokens=tokens, **GREEDY), use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in answers]


def counted(llm: LLM, name: str) -> float:
    return sum(metric.value for metric in llm.get_metrics() if metric.name == f"vllm:{name}")


def with_role(role: str, storage: Path) -> dict[str, Any]:
    config = KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role=role,
        kv_connector_extra_config={"shared_storage_path": str(storage)},
    )
    return {"kv_transfer_config": config}


def test_one_engine_reads_prompts_and_another_writes_texts(tmp_path: Path) -> None:
    """Both draft. What is written is plain decoding's, and as many drafts are accepted as beside
    prompts that the engine read itself: the drafter's context comes as well.

    This connector saves a layer when it runs, so the first engine has to draft once: lengths are
    fixed, and it writes more than a token.
    """
    with engine() as plain:
        expected = texts(plain, 32)
    with engine(speculative_config=FIXED) as alone:
        assert texts(alone, 32) == expected
        accepted = [counted(alone, name) for name in ACCEPTED]
    with engine(speculative_config=FIXED, **with_role("kv_producer", tmp_path)) as prefill:
        assert texts(prefill, 8) == [text[:8] for text in expected]
    with engine(speculative_config=FIXED, **with_role("kv_consumer", tmp_path)) as decode:
        assert texts(decode, 32) == expected
        hits, asked = (counted(decode, f"external_prefix_cache_{name}") for name in HITS)
        assert hits > 0.8 * asked
        assert [counted(decode, name) for name in ACCEPTED] == accepted
