"""Draft trees on Model Runner V2, over vLLM's attention kernels for GPUs, in the interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from support import DEMO
from support.context_rows import written_step_by_step
from support.engines import (
    DFLASH,
    DRAFTER,
    FIXED,
    as_the_reference,
    engine,
    greedy,
    held_out_prompts,
    proposer_of,
    token_ids,
)
from support.interpreter import triton_attention
from support.planner_world import costs_of_a_gpu
from vllm_dflash.planning.planner import Planner

pytestmark = [
    pytest.mark.parametrize("runner", ["v2"], indirect=True),
    pytest.mark.usefixtures("runner"),
]
LIMIT = 64
TEXTS = [text[:90] for text in held_out_prompts(4)]


def settings(**changes: Any) -> dict[str, Any]:
    """Several requests, prompts in chunks."""
    return {"max_model_len": LIMIT, "max_num_seqs": 3, "max_num_batched_tokens": 72, **changes}


@pytest.fixture(autouse=True)
def _kernels_of_gpus() -> Iterator[None]:
    with triton_attention():
        yield


class Plain(NamedTuple):
    """What plain vLLM writes."""

    to_the_end: list[list[int]]
    """To the context limit, each."""
    sampled: list[list[int]]
    mixed: list[tuple[list[int], str]]


SAMPLED = [SamplingParams(temperature=0.9, seed=number, max_tokens=16) for number in range(3)]
CHAINED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"logprobs": 2},
    {"min_tokens": 12},
    {"structured_outputs": StructuredOutputsParams(regex="[a-z ]{30}")},
]
MIXED = [greedy(16, **setting) for setting in ({}, *CHAINED, {"stop": ["return", "self."]})]


def write_mixed(llm: LLM) -> list[tuple[list[int], str]]:
    prompts = [TEXTS[number % 3] for number in range(len(MIXED))]
    outputs = llm.generate(prompts, MIXED, use_tqdm=False)
    return [(list(one.outputs[0].token_ids), one.outputs[0].text) for one in outputs]


@pytest.fixture(scope="module")
def plain() -> Plain:
    with engine(**settings()) as llm:
        return Plain(
            token_ids(llm, TEXTS, greedy(LIMIT, ignore_eos=True)),
            token_ids(llm, TEXTS[:3], SAMPLED),
            write_mixed(llm),
        )


@pytest.mark.parametrize(("nodes", "count"), [(15, 4), (64, 2)])
def test_forced_trees_write_what_plain_decoding_writes(
    plain: Plain, nodes: int, count: int
) -> None:
    """To the context limit, in chunks, with preemption; no context is ever lost."""
    asked = {**FIXED, "draft_tree": nodes}
    with engine(speculative_config=asked, **settings(num_gpu_blocks_override=8)) as llm:
        assert proposer_of(llm).trees is not None
        params = greedy(LIMIT, ignore_eos=True)
        written = written_step_by_step(llm, TEXTS[:count], params)
        assert written == plain.to_the_end[:count]
        (stats,) = llm.collective_rpc("dflash_stats")
    assert stats["captures_after_warmup"] == stats["reallocations_after_warmup"] == 0
    assert stats["accepted_tokens"] > 30
    assert stats["tree_nodes"] > 0.5 * stats["draft_tokens"]
    assert stats["tree_gain"] > 0.1


@pytest.mark.parametrize("drafter", [DRAFTER, DEMO / "drafter2"], ids=["dflash", "dflash2"])
def test_every_step_accepts_what_the_references_tree_does(drafter: Path) -> None:
    _, stats = as_the_reference(drafter, TEXTS[:3], 24, 15, **settings())
    assert stats["mean_acceptance_length"] > 2.0


def test_planned_trees_where_rows_are_cheap(plain: Plain) -> None:
    """By the costs of a GPU: some requests get trees, some chains, some free drafts."""
    with engine(speculative_config={**DFLASH, "draft_tree": 32}, **settings()) as llm:
        speculator = proposer_of(llm)
        speculator.adapt_lengths(costs_of_a_gpu(4))
        policy = speculator.lengths.policy
        assert isinstance(policy, Planner)
        policy.observe = lambda step: None
        written = token_ids(llm, TEXTS[:2], greedy(32, ignore_eos=True))
        assert written == [text[:32] for text in plain.to_the_end[:2]]
        (stats,) = llm.collective_rpc("dflash_stats")
    assert stats["tree_verifications"] > 5
    assert policy.trees.calibration.seen[1:].sum() > 20


def test_sampled_text_is_plain_decodings_own_token_for_token(plain: Plain) -> None:
    """This runner draws by seed and position, and each token of a tree is drawn as if alone."""
    with engine(speculative_config={**FIXED, "draft_tree": 15}, **settings()) as llm:
        assert token_ids(llm, TEXTS[:3], SAMPLED) == plain.sampled
        (stats,) = llm.collective_rpc("dflash_stats")
    assert stats["tree_nodes"] == stats["draft_tokens"] > 0
    assert stats["tree_accepted_tokens"] > 5


def test_settings_that_need_chains_beside_requests_with_trees(plain: Plain) -> None:
    """All at once, each as plain decoding has it."""
    asked = {**FIXED, "draft_tree": 15}
    with engine(speculative_config=asked, **settings(max_num_seqs=6)) as llm:
        assert write_mixed(llm) == plain.mixed
        (stats,) = llm.collective_rpc("dflash_stats")
    assert 0 < stats["tree_nodes"] < stats["draft_tokens"]
