"""Free drafts on a real engine: the tokens are plain decoding's, whatever is verified."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from vllm import LLM

from support.context_rows import written_step_by_step
from support.engines import DFLASH, engine, greedy, held_out_prompts, proposer_of, token_ids
from support.forced_texts import ForcedTexts
from support.planner_world import steady_costs
from vllm_dflash.planning.planner import Planner

PROMPTS = [prompt + prompt for prompt in held_out_prompts(6)] + held_out_prompts(3)
LIMIT = 320


def settings(**changes: Any) -> dict[str, Any]:
    return {"max_model_len": LIMIT, "max_num_seqs": 6, "max_num_batched_tokens": 96, **changes}


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    """Texts of plain decoding, each up to the context limit."""
    with engine(**settings()) as llm:
        return token_ids(llm, PROMPTS, greedy(LIMIT, ignore_eos=True))


@pytest.fixture(scope="module")
def shared(plain: list[list[int]]) -> Iterator[LLM]:
    with engine(speculative_config=dict(DFLASH), **settings(num_gpu_blocks_override=40)) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    assert shared.reset_prefix_cache()
    proposer_of(shared).statistics.clear()
    yield shared
    (stats,) = shared.collective_rpc("dflash_stats")
    assert stats["captures_after_warmup"] == stats["reallocations_after_warmup"] == 0


def test_off_is_off(plain: list[list[int]]) -> None:
    off = {**DFLASH, "free_drafts": "off"}
    with engine(speculative_config=off, **settings()) as llm:
        assert proposer_of(llm).host.free_drafts is None
        assert proposer_of(llm).num_speculative_tokens == 7
        assert token_ids(llm, PROMPTS[:2], greedy(16)) == [text[:16] for text in plain[:2]]


def write(llm: LLM) -> list[list[int]]:
    """Write all texts; check that the drafter never loses context."""
    return written_step_by_step(llm, PROMPTS, greedy(LIMIT, ignore_eos=True))


@pytest.mark.parametrize("seed", range(3))
def test_forced_ones_of_any_length_beside_blocks(
    llm: LLM, plain: list[list[int]], seed: int
) -> None:
    """Texts go to the context limit, with prompts in chunks and too little cache for all."""
    proposer = proposer_of(llm)
    proposer.host.planner = ForcedTexts(proposer.width, seed)
    assert write(llm) == plain
    (stats,) = llm.collective_rpc("dflash_stats")
    assert stats["free_accepted_tokens"] > 200
    assert stats["free_draft_tokens"] < stats["draft_tokens"]


def test_all_that_is_predicted(llm: LLM, plain: list[list[int]]) -> None:
    proposer = proposer_of(llm)
    proposer.host.planner = ForcedTexts(proposer.width, whole=True)
    assert write(llm) == plain
    (stats,) = llm.collective_rpc("dflash_stats")
    assert stats["drafted_steps"] == 0
    assert stats["draft_tokens"] == stats["free_draft_tokens"]
    assert stats["draft_tokens"] / stats["free_verifications"] > proposer.width


def test_nonsense(llm: LLM, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that always predicts something wrong costs time and nothing else."""
    proposer, dice = proposer_of(llm), np.random.default_rng(0)
    proposer.host.planner = ForcedTexts(proposer.width, whole=True)

    def nonsense(request: int, length: int) -> list[int]:
        return dice.integers(0, proposer.runner.input_batch.vocab_size, length).tolist()

    monkeypatch.setattr(proposer.host.free_drafts, "tokens", nonsense)
    assert write(llm) == plain
    (stats,) = llm.collective_rpc("dflash_stats")
    assert stats["free_draft_tokens"] > 50 * stats["free_accepted_tokens"]


def test_planned_ones(llm: LLM, plain: list[list[int]]) -> None:
    proposer = proposer_of(llm)
    most_free = proposer.num_speculative_tokens
    proposer.host.planner = Planner(proposer.width, 6, steady_costs(6), most_free=most_free)
    assert write(llm) == plain
    (stats,) = llm.collective_rpc("dflash_stats")
    assert stats["free_accepted_tokens"] > 0.5 * stats["free_draft_tokens"] > 0
