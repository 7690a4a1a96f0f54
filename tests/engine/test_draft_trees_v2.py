"""Draft trees on Model Runner V2: grown, verified and moved on the device, in the interpreter.

The target attends with the kernels for trees over vLLM's cache for GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from reference.reference_drafter import ReferenceDrafter
from support.device_decisions import directed, drafting, prefer
from support.engines import (
    DFLASH,
    DRAFTER,
    FIXED,
    TARGET,
    acceptance_by_request,
    counted,
    engine,
    fix_costs,
    greedy,
    held_out_prompts,
    in_order,
    proposer_of,
    scheduler_of,
    token_ids,
)
from support.interpreter import triton_attention
from support.reference_decoding import generate
from support.reference_trees import acceptance_lengths
from support.stepped_requests import joined, tokens_by_step
from support.tree_ranks import interpreting_ranks
from vllm_dflash.checkpoint.read import read_drafter

pytestmark = pytest.mark.v2
NODES, NEW_TOKENS = 12, 14
TEXTS = [text[:60] for text in held_out_prompts(3)]
SETTINGS = {"max_model_len": 96, "max_num_seqs": 5, "max_num_batched_tokens": 80}
SAMPLED = [SamplingParams(temperature=0.9, seed=number, max_tokens=12) for number in range(2)]
CHAINED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"logprobs": 2},
    {"structured_outputs": StructuredOutputsParams(regex="[a-z ]{30}")},
]


def mixed() -> tuple[list[str], list[SamplingParams]]:
    """Return requests that may have trees, requests that may not, and drawn ones."""
    params = [greedy(12), *(greedy(12, **one) for one in CHAINED), *SAMPLED]
    return [TEXTS[number % 3] for number in range(len(params))], params


@pytest.fixture(scope="module")
def plain() -> dict[str, list[list[int]]]:
    """Texts that plain vLLM writes, with attention that is not interpreted."""
    with engine(**SETTINGS) as llm:
        return {
            "greedy": token_ids(llm, TEXTS, greedy(NEW_TOKENS, ignore_eos=True)),
            "mixed": token_ids(llm, *mixed()),
        }


@pytest.fixture(
    scope="module",
    params=["asynchronous", pytest.param("synchronous", marks=pytest.mark.slow)],
)
def llm(request: pytest.FixtureRequest, plain: Any) -> Iterator[LLM]:
    settings = {**SETTINGS, "speculative_config": {**FIXED, "draft_tree": NODES}}
    with triton_attention(), engine(request.param, **settings) as llm:
        assert proposer_of(llm).trees.is_attached
        yield llm


def test_what_is_written_and_accepted_is_the_references(
    llm: LLM, plain: dict[str, list[list[int]]]
) -> None:
    """The text is plain decoding's token for token, and each step accepts what a reference's tree
    accepts, in an engine that has learned nothing."""
    proposer_of(llm).slots.overall.zero_()
    target = Qwen3ForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    drafter = ReferenceDrafter.load(read_drafter(str(DRAFTER)), DRAFTER).float()
    with pytest.MonkeyPatch.context() as patch:
        scheduler = scheduler_of(llm)
        patch.setattr(scheduler, "update_from_output", scheduler.update_from_output)
        lengths = acceptance_by_request(llm)
        outputs = llm.generate(TEXTS, greedy(NEW_TOKENS, ignore_eos=True), use_tqdm=False)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    assert tokens == plain["greedy"]
    num_steps = []
    for output, found in zip(outputs, in_order(lengths), strict=True):
        written = list(output.outputs[0].token_ids)
        prompt = list(output.prompt_token_ids or ())
        expected = acceptance_lengths(target, drafter, prompt, written, NODES)
        assert counted(found, written) == counted(expected, written)
        chains = generate(target, drafter, prompt, NEW_TOKENS, whole_blocks=True)
        num_steps.append((len(expected), len(chains.acceptance_lengths)))
    of_trees, of_chains = map(sum, zip(*num_steps, strict=True))
    assert of_trees < of_chains  # nodes outside the most likely chain are accepted


def test_chains_and_drawn_tokens_beside_trees(llm: LLM, plain: dict[str, list[list[int]]]) -> None:
    """Drawn tokens are plain decoding's own: this runner draws by seed and position."""
    assert token_ids(llm, *mixed()) == plain["mixed"]


def test_trees_of_different_sizes_and_texts_beside_them(
    plain: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first nodes of their trees, more of some requests' than of others'. Some requests have
    chains that their texts predict."""
    settings = {**SETTINGS, "speculative_config": {**DFLASH, "draft_tree": NODES}}
    fix_costs(monkeypatch)
    with triton_attention(), engine("asynchronous", **settings) as llm:
        assert proposer_of(llm).trees.is_attached
        scheduler = scheduler_of(llm)
        prefer(llm, text=0.6, block=0.5)
        directed(llm, monkeypatch, lambda most: drafting(most, runs_block=True))
        sizes = np.array([3, 7, NODES])
        of_trees = scheduler._trees._lengths_of_trees
        monkeypatch.setattr(
            scheduler._trees,
            "lengths",
            lambda plan, limits, names, requests, _: np.minimum(
                of_trees(plan.lengths, limits, names, requests)[-1], sizes[: len(names)]
            ),
        )
        tokens = token_ids(llm, TEXTS, greedy(NEW_TOKENS, ignore_eos=True))
        (stats,) = llm.collective_rpc("dflash_stats")
        lengths = scheduler.statistics.draft_lengths
    assert tokens == plain["greedy"]
    assert 0 < stats["free_draft_tokens"] < stats["draft_tokens"]
    assert stats["accepted_tokens"] > 10
    assert min(lengths[size] for size in sizes) > 0
    assert stats["captures_after_warmup"] == stats["reallocations_after_warmup"] == 0


@pytest.mark.slow  # three processes start, and interpret
def test_two_ranks_grow_the_same_trees(plain: dict[str, list[list[int]]], tmp_path: Path) -> None:
    """Each rank grows its own, from logits equal to the last bit, with its own heads of the target
    and of the cache. Text and acceptance are the reference's, as with one rank."""
    settings: dict[str, Any] = {**SETTINGS, "speculative_config": {**FIXED, "draft_tree": NODES}}
    settings |= {"tensor_parallel_size": 2, "worker_extension_cls": "support.tree_ranks.Grower"}
    target = Qwen3ForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    drafter = ReferenceDrafter.load(read_drafter(str(DRAFTER)), DRAFTER).float()
    with interpreting_ranks(tmp_path), engine(**settings) as llm:
        prompts = [llm.get_tokenizer().encode(text) for text in TEXTS]
        assert llm.collective_rpc("watch") == [True, True]
        steps = tokens_by_step(llm, TEXTS, greedy(NEW_TOKENS, ignore_eos=True))
        (first, learned), (second, also_learned) = llm.collective_rpc("written_down")
    assert joined(steps) == plain["greedy"]
    assert len(first) > 4
    assert first == second
    assert (learned == also_learned).all()
    accepted = 0
    for prompt, steps_of, written in zip(prompts, steps, plain["greedy"], strict=True):
        found = [len(tokens) for tokens in steps_of[1:]]
        expected = acceptance_lengths(target, drafter, prompt, written, NODES)
        assert counted(found, written) == counted(expected, written)
        accepted += sum(found) - len(found)
    assert accepted > len(TEXTS)
