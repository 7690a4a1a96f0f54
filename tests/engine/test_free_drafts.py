"""Free drafts on a real engine: the tokens are plain decoding's, whatever is verified."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from vllm import LLM

from support.context_rows import ContextRows
from support.engines import DFLASH, engine, greedy, held_out_prompts, proposer_of, token_ids
from support.forced_texts import ForcedTexts
from support.stepped_requests import joined, run_by_hand

PROMPTS = [prompt + prompt for prompt in held_out_prompts(6)] + held_out_prompts(3)
PARAMS = greedy(320, ignore_eos=True)
SETTINGS = {"max_model_len": 320, "max_num_seqs": 6, "max_num_batched_tokens": 96}


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    """Texts of plain decoding, each up to the context limit."""
    with engine(**SETTINGS) as llm:
        return token_ids(llm, PROMPTS, PARAMS)


@pytest.fixture(scope="module")
def llm(plain: list[list[int]]) -> Iterator[LLM]:
    with engine(speculative_config=dict(DFLASH), num_gpu_blocks_override=40, **SETTINGS) as llm:
        yield llm


def counters(llm: LLM, plain: list[list[int]], forced: ForcedTexts) -> dict[str, Any]:
    """Write all texts by this policy, check them, and check that the drafter never loses context.
    Return our counters."""
    assert llm.reset_prefix_cache()
    proposer, context = proposer_of(llm), ContextRows(llm)
    proposer.statistics.clear()
    proposer.host.planner = forced

    def check() -> None:
        assert not context.missing()

    written = run_by_hand(llm, PROMPTS, PARAMS, check)
    context.stop()
    assert joined([*written.steps.values()]) == plain
    (stats,) = llm.collective_rpc("dflash_stats")
    assert stats["captures_after_warmup"] == stats["reallocations_after_warmup"] == 0
    return stats


@pytest.mark.parametrize("seed", range(2))
def test_any_length_beside_blocks(llm: LLM, plain: list[list[int]], seed: int) -> None:
    """Texts go to the context limit, with prompts in chunks and too little cache for all."""
    stats = counters(llm, plain, ForcedTexts(proposer_of(llm).width, seed))
    assert stats["free_accepted_tokens"] > 200
    assert stats["free_draft_tokens"] < stats["draft_tokens"]


def test_all_that_is_predicted(llm: LLM, plain: list[list[int]]) -> None:
    width = proposer_of(llm).width
    stats = counters(llm, plain, ForcedTexts(width, whole=True))
    assert stats["drafted_steps"] == 0
    assert stats["draft_tokens"] == stats["free_draft_tokens"]
    assert stats["draft_tokens"] / stats["free_verifications"] > width


def test_nonsense(llm: LLM, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that always predicts something wrong costs time and nothing else."""
    proposer, dice = proposer_of(llm), np.random.default_rng(0)

    def nonsense(request: int, length: int) -> list[int]:
        return dice.integers(0, proposer.runner.input_batch.vocab_size, length).tolist()

    monkeypatch.setattr(proposer.host.free_drafts, "tokens", nonsense)
    stats = counters(llm, plain, ForcedTexts(proposer.width, whole=True))
    assert stats["free_draft_tokens"] > 50 * stats["free_accepted_tokens"]
