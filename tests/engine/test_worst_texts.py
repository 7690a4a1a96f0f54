"""Texts on Model Runner V2 where all kernels compute as badly as on a GPU (`worst_arithmetic`).

Chances and drafts may be others. What is verified may not: it is plain decoding's, with seeds and
greedily, for both draw with the same numbers (docs/engineering/gpu_arithmetic.md)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from vllm import LLM, SamplingParams
from vllm.v1.sample.ops import topk_topp_sampler

from emulated.interpreter import worst_arithmetic
from support.device_decisions import directed, lengths_in_turn, prefer
from support.engines import DFLASH, engine, fix_costs, held_out_prompts

pytestmark = pytest.mark.v2
REQUESTS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 0.8, "repetition_penalty": 1.3},
)
SETTINGS: dict[str, Any] = {"max_model_len": 192, "max_num_seqs": 5, "max_num_batched_tokens": 96}
PROMPTS = [2 * text[:30] for text in held_out_prompts(len(REQUESTS))]  # texts that repeat something


@pytest.fixture(autouse=True)
def _worst(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(topk_topp_sampler, "HAS_TRITON", False)  # its kernel is not interpreted
    with worst_arithmetic():
        yield


def texts_of(llm: LLM) -> list[list[int]]:
    params = [
        SamplingParams(max_tokens=14, seed=seed, **changes) for seed, changes in enumerate(REQUESTS)
    ]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_the_text_is_plain_decodings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks, free drafts, and steps without drafts, in turn."""
    with engine("asynchronous", **SETTINGS) as llm:
        plain = texts_of(llm)
    fix_costs(monkeypatch)
    with engine("asynchronous", speculative_config=dict(DFLASH), **SETTINGS) as llm:
        prefer(llm, text=0.7, block=0.5)
        directed(llm, monkeypatch, lengths_in_turn(7, 3, 0, 1))
        found = texts_of(llm)
        (stats,) = llm.collective_rpc("dflash_stats")
    assert found == plain
    assert stats["accepted_tokens"] > 10
    assert stats["draft_tokens"] > stats["accepted_tokens"]
    assert stats["nan_drafts"] == 0
