"""Drafts change no token of a seeded text on Model Runner V2, at any temperature.

Verification draws what plain decoding would draw (`engine/v2/drawing.py`). So whatever is drafted,
and however much of it, the text is plain decoding's, token for token; this also is the proof that
its distribution is. In float32: in bfloat16, batches of other shapes round logits differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.sample.ops import topk_topp_sampler

from emulated.interpreter import worst_arithmetic
from support.device_decisions import directed, drafting, lengths_in_turn, prefer
from support.engines import DFLASH, FIXED, engine, fix_costs, held_out_prompts
from support.interpreter import triton_attention
from vllm_dflash.planning import Ints
from vllm_dflash.planning.step import Plan

pytestmark = pytest.mark.v2
TOKENS = 20
Texts = dict[str, list[list[int]]]
REQUESTS: dict[str, dict[str, Any]] = {
    "temperature 0.3": {"temperature": 0.3},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 1": {},
    "temperature 1.5": {"temperature": 1.5},
    "top-p": {"top_p": 0.8},
    "top-k": {"top_k": 5, "temperature": 0.9},
    "min-tokens": {"min_tokens": 15, "stop_token_ids": [*range(0, 2048, 17)]},
    "stop tokens": {"stop_token_ids": [*range(0, 2048, 16)]},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "bad words": {"bad_words": [" the", " and"]},
    "three answers": {"n": 3},
    "log-probabilities": {"logprobs": 2, "temperature": 0.8},
    "grammar": {"structured_outputs": StructuredOutputsParams(regex="[a-z ]{12,30}")},
    "greedy": {"temperature": 0.0},
}
SETTINGS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 6, "max_num_batched_tokens": 96}
PROMPTS = [2 * text[:40] for text in held_out_prompts(len(REQUESTS))]  # texts that repeat something


def texts_of(llm: LLM, requests: Mapping[str, dict[str, Any]] = REQUESTS) -> Texts:
    """Return the tokens of each request's answers."""
    params = [
        SamplingParams(**{"temperature": 1.0, "max_tokens": TOKENS, "seed": seed, **changes})
        for seed, changes in enumerate(requests.values())
    ]
    outputs = llm.generate(PROMPTS[: len(params)], params, use_tqdm=False)
    return {
        name: [list(one.token_ids) for one in output.outputs]
        for name, output in zip(requests, outputs, strict=True)
    }


@pytest.fixture(scope="module", autouse=True)
def _without_vllms_kernel() -> Iterator[None]:
    """Let torch apply top-k and top-p: Triton's interpreter cannot run vLLM's kernel for them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topk_topp_sampler, "HAS_TRITON", False)
        yield


@pytest.fixture(scope="module")
def plain() -> Texts:
    """Plain decoding's texts. Only one request's is greedy: the others say something of drawing."""
    with engine("asynchronous", **SETTINGS) as llm:
        drawn, most_likely = (
            texts_of(llm),
            texts_of(llm, {name: {"temperature": 0.0} for name in REQUESTS}),
        )
    assert [name for name in REQUESTS if drawn[name][0] == most_likely[name][0]] == ["greedy"]
    assert len({tuple(tokens) for tokens in drawn["three answers"]}) == 3
    return drawn


def ragged(limits: Ints) -> Plan:
    """Give each request a length of its own."""
    return drafting(np.minimum(limits, 1 + 3 * np.arange(len(limits)) % 8), runs_block=True)


ENGINES: dict[str, tuple[str, dict[str, Any], Callable[[Ints], Plan] | None]] = {
    "fixed": ("asynchronous", FIXED, None),
    "lengths in turn": ("asynchronous", DFLASH, lengths_in_turn(7, 3, 0, 1, 7)),
    "a length for each": ("asynchronous", DFLASH, ragged),
    "synchronous": ("synchronous", DFLASH, lengths_in_turn(7, 2, 0)),
    "trees": ("asynchronous", {**FIXED, "draft_tree": 9}, None),
}
SLOW = ("fixed", "synchronous", "trees")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in ENGINES],
)
def test_the_text_is_plain_decodings(
    name: str, plain: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks and, where lengths are planned, free drafts: each is preferred by half the engines."""
    way, speculative, plan = ENGINES[name]
    fix_costs(monkeypatch)
    attention = triton_attention() if name == "trees" else nullcontext()
    # Prompts in more chunks than in plain decoding: a seed is as far on after them.
    settings = {**SETTINGS, "speculative_config": dict(speculative)}
    settings |= {"long_prefill_token_threshold": 16}
    with attention, engine(way, **settings) as llm:
        if plan is not None:
            text = 0.9 if name == "lengths in turn" else 0.5
            prefer(llm, text=text, block=0.5)
            directed(llm, monkeypatch, plan)
        found = texts_of(llm)
        (stats,) = llm.collective_rpc("dflash_stats")
    assert found == plain
    assert stats["accepted_tokens"] > 40
    assert stats["draft_tokens"] > stats["accepted_tokens"]
    if plan is not None:
        assert stats["free_accepted_tokens"] > 0


def test_kernels_that_compute_as_badly_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chances and drafts may be others. What is verified may not: plain decoding and verification
    draw with the same numbers (docs/engineering/gpu_arithmetic.md)."""
    names = ("greedy", "temperature 1", "temperature 0.7", "top-p", "penalties")
    some = {name: REQUESTS[name] for name in names}
    fix_costs(monkeypatch)
    with worst_arithmetic():
        with engine("asynchronous", **SETTINGS) as llm:
            expected = texts_of(llm, some)
        with engine("asynchronous", speculative_config=dict(DFLASH), **SETTINGS) as llm:
            prefer(llm, text=0.7, block=0.5)
            directed(llm, monkeypatch, lengths_in_turn(7, 3, 0, 1))
            found = texts_of(llm, some)
            (stats,) = llm.collective_rpc("dflash_stats")
    assert found == expected
    assert stats["draft_tokens"] > stats["accepted_tokens"] > 10
    assert stats["nan_drafts"] == 0
