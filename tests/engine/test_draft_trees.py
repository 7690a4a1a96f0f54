"""Draft trees on a real engine (V1): plain vLLM's text, and the reference's trees step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm import LLM
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
    tokens_by_step,
)
from support.families import make_family
from support.planner_world import costs_of_a_gpu
from vllm_dflash.engine.v1.block_forward import BlockCandidates, BlockDrafts
from vllm_dflash.planning.planner import Planner

DRAFTER2 = DEMO / "drafter2"
LIMIT, NEW_TOKENS = 320, 48
PROMPTS = held_out_prompts(8)


def settings(**changes: Any) -> dict[str, Any]:
    """Several requests, prompts in chunks, too little cache for all."""
    return {"max_model_len": LIMIT, "max_num_seqs": 6, "max_num_batched_tokens": 192, **changes}


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    """To the context limit, each."""
    with engine(**settings()) as llm:
        return token_ids(llm, PROMPTS, greedy(LIMIT, ignore_eos=True))


def write(llm: LLM, count: int = len(PROMPTS)) -> list[list[int]]:
    """All of it; no context of the drafter's is ever lost."""
    return written_step_by_step(llm, PROMPTS[:count], greedy(LIMIT, ignore_eos=True))


@pytest.mark.parametrize("nodes", [2, 15, 64])
def test_forced_trees_write_what_plain_decoding_writes(plain: list[list[int]], nodes: int) -> None:
    """To the context limit, in chunks, with preemption."""
    with engine(
        speculative_config={**FIXED, "draft_tree": nodes},
        **settings(num_gpu_blocks_override=40),
    ) as llm:
        assert proposer_of(llm).trees is not None
        assert write(llm, 5) == plain[:5]
        (stats,) = llm.collective_rpc("dflash_stats")
    assert stats["captures_after_warmup"] == stats["reallocations_after_warmup"] == 0
    assert stats["accepted_tokens"] > 100
    # The second of two nodes mostly stands behind the first.
    assert stats["tree_nodes"] > (0.05 if nodes == 2 else 0.5) * stats["draft_tokens"]
    assert stats["tree_gain"] > (0.0 if nodes == 2 else 0.1)


@pytest.mark.parametrize("drafter", [DRAFTER, DRAFTER2], ids=["dflash", "dflash2"])
def test_every_step_accepts_what_the_references_tree_does(drafter: Path) -> None:
    _, stats = as_the_reference(drafter, PROMPTS, NEW_TOKENS, 15, **settings())
    assert stats["mean_acceptance_length"] > 2.0


def test_planned_trees_where_rows_are_cheap(plain: list[list[int]]) -> None:
    """By the costs of a GPU: some requests get trees, some chains, some free drafts."""
    asked = {**DFLASH, "draft_tree": 32}
    with engine(speculative_config=asked, **settings(num_gpu_blocks_override=40)) as llm:
        proposer = proposer_of(llm)
        most_free = proposer.num_speculative_tokens
        policy = Planner(proposer.width, 6, costs_of_a_gpu(6), most_free=most_free)
        proposer.lengths.policy = policy
        policy.observe = lambda step: None
        assert write(llm) == plain
        (stats,) = llm.collective_rpc("dflash_stats")
    assert stats["tree_verifications"] > 20
    assert stats["tree_gain"] > 0.2
    assert stats["free_verifications"] > 0
    assert policy.trees.ranks.seen[1:].sum() > 100
    assert policy.trees.gain > 1.0


def test_on_a_cpu_rows_are_too_dear_for_trees_by_themselves(plain: list[list[int]]) -> None:
    with engine(speculative_config=dict(DFLASH), **settings()) as llm:
        assert proposer_of(llm).options.draft_tree == "auto"
        assert proposer_of(llm).trees is None
        assert token_ids(llm, PROMPTS[:1], greedy(8)) == [plain[0][:8]]


CHAINED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.0},
    {"logprobs": 2},
    {"min_tokens": 20},
    {"bad_words": ["the", "self"]},
    {"structured_outputs": StructuredOutputsParams(regex="[a-z ]{30}")},
]


def test_settings_that_need_chains_beside_requests_with_trees() -> None:
    """All at once, each as plain decoding has it."""
    params = [greedy(24, **setting) for setting in ({}, *CHAINED, {"stop": ["return", "self."]})]
    prompts = [PROMPTS[number % 3] for number in range(len(params))]
    texts = []
    for speculative in (None, {**FIXED, "draft_tree": 15}):
        with engine(speculative_config=speculative, **settings(max_num_seqs=9)) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            texts.append([(list(one.outputs[0].token_ids), one.outputs[0].text) for one in outputs])
            logprobs = [one.outputs[0].logprobs for one in outputs]
            if speculative:
                (stats,) = llm.collective_rpc("dflash_stats")
                assert 0 < stats["tree_nodes"] < stats["draft_tokens"]
    assert texts[0] == texts[1]
    assert [bool(one) for one in logprobs] == ["logprobs" in one for one in ({}, *CHAINED, {})]


@pytest.mark.parametrize("family", ["gemma4", "gpt-oss", "mistral", "qwen3-moe"])
def test_paths_that_are_no_first_chain_under_windows_and_sinks(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every place has the right token, but as the second best: the way of all second ones is the
    last path of the tree, and it is accepted only if its rows see their ancestors and nobody else.
    """
    made = make_family(tmp_path, family)
    written = [ids[0].tolist() for ids, _ in made.written.values()]
    speculative = {**FIXED, "model": str(tmp_path / "drafter"), "draft_tree": 15}
    with made.engine(speculative_config=speculative, max_num_batched_tokens=128) as llm:
        proposer = proposer_of(llm)

        def second_best(inputs: Any, block_table: Any) -> BlockDrafts:
            lengths = np.diff(inputs.query_start_loc) - 1
            shape = len(lengths), int(lengths.max())
            tokens = np.zeros((*shape, 2), np.int64)
            for block, request in enumerate(inputs.requests):
                text = written[int(proposer.step.ids[request].split("-")[0])]
                start = int(inputs.positions[inputs.query_start_loc[block]])
                assert inputs.input_ids[inputs.query_start_loc[block]] == text[start]
                right = [*text[start + 1 :], *[0] * shape[1]][: shape[1]]
                tokens[block, :, 1] = right
                tokens[block, :, 0] = [(token + 1) % 300 for token in right]
            chances = np.tile(np.array([0.5, 0.4]), (*shape, 1, 1))
            drafts = [tokens[block, :length, 0].tolist() for block, length in enumerate(lengths)]
            others = BlockCandidates(tokens, chances)
            return BlockDrafts(inputs.requests, drafts, chances[:, :, 0, 0], others)

        monkeypatch.setattr(proposer.block, "draft", second_best)
        prompts = [{"prompt_token_ids": list(prompt)} for prompt in made.written]
        steps = tokens_by_step(llm, prompts, greedy(24, ignore_eos=True))
        (stats,) = llm.collective_rpc("dflash_stats")
    for text, prompt, of_request in zip(written, made.written, steps, strict=True):
        assert [token for step in of_request for token in step] == text[len(prompt) :]
        assert sorted(map(len, of_request[1:]))[1] == 4  # three nodes and the bonus token
    assert stats["tree_gain"] > 2.5
