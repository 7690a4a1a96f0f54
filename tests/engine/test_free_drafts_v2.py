"""Free drafts on Model Runner V2, with every way of scheduling steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm import LLM

from support.device_decisions import directed, drafting, prefer
from support.engines import (
    DFLASH,
    engine,
    fix_costs,
    greedy,
    held_out_prompts,
    proposer_of,
    scheduler_of,
    token_ids,
)
from vllm_dflash.engine.v2.draft_slots import Batch

pytestmark = pytest.mark.v2
PROMPTS = [prompt + prompt for prompt in held_out_prompts(3)]
PARAMS = greedy(24, ignore_eos=True)
SETTINGS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 3, "max_num_batched_tokens": 64}


@pytest.fixture(
    scope="module",
    params=["asynchronous", pytest.param("synchronous", marks=pytest.mark.slow)],
)
def both(request: pytest.FixtureRequest) -> Iterator[tuple[list[list[int]], LLM]]:
    """Plain decoding's texts, and an engine with free drafts."""
    with engine(request.param, **SETTINGS) as llm:
        plain = token_ids(llm, PROMPTS, PARAMS)
    with pytest.MonkeyPatch.context() as patch:
        fix_costs(patch)
        with engine(request.param, speculative_config=dict(DFLASH), **SETTINGS) as llm:
            yield plain, llm


def count_from_here(llm: LLM) -> None:
    """Clear the counters. The last test's last step may run after its requests have ended."""
    token_ids(llm, PROMPTS[:1], greedy(1))
    proposer_of(llm).slots.counts.zero_()
    proposer_of(llm).statistics.clear()


def stats_of(llm: LLM) -> dict[str, Any]:
    (stats,) = llm.collective_rpc("dflash_stats")
    return stats


def test_texts_are_taken_where_no_block_is_run(
    both: tuple[list[list[int]], LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter never runs."""
    plain, llm = both
    prefer(llm, text=0.99, block=0.01)
    directed(llm, monkeypatch, lambda most: drafting(most, runs_block=False))
    count_from_here(llm)
    assert token_ids(llm, PROMPTS, PARAMS) == plain
    stats = stats_of(llm)
    assert 0 < stats["free_accepted_tokens"] <= stats["free_draft_tokens"]
    assert stats["drafted_steps"] == 0
    assert stats["draft_tokens"] == stats["free_draft_tokens"]
    assert stats["captures_after_warmup"] == stats["reallocations_after_warmup"] == 0


def test_look_ups_that_predict_nonsense_change_nothing_but_speed(
    both: tuple[list[list[int]], LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are always long, trusted and wrong, and include the first and the last token of the
    vocabulary."""
    plain, llm = both
    speculator = proposer_of(llm)
    prefer(llm, text=0.99, block=0.01)
    directed(llm, monkeypatch, lambda most: drafting(most, runs_block=True))
    count_from_here(llm)
    vocab_size = llm.llm_engine.model_config.get_vocab_size()
    texts = speculator.free_drafts

    def nonsense(_: Any, batch: Batch) -> None:
        count = len(batch.slots)
        texts.tokens[:count] = torch.arange(texts.tokens.shape[1]) * 293 % vocab_size
        texts.tokens[:count, 0], texts.tokens[:count, 1] = vocab_size - 1, 0
        texts.matches[:count] = 32 * (batch.num_sampled > 0)

    monkeypatch.setattr(type(texts), "look_up", nonsense)
    assert token_ids(llm, PROMPTS, PARAMS) == plain
    stats = stats_of(llm)
    assert stats["free_draft_tokens"] > 50
    assert stats["free_accepted_tokens"] < 0.05 * stats["free_draft_tokens"]


def test_planned_ones(both: tuple[list[list[int]], LLM]) -> None:
    """The planner decides by itself: it uses both texts and blocks, and learns about both."""
    plain, llm = both
    planner = scheduler_of(llm).planner
    proposer_of(llm).slots.forget_all()
    count_from_here(llm)
    for turn in range(8):
        assert token_ids(llm, PROMPTS, PARAMS) == plain
        if turn and min(planner.texts.of_all[0], planner.blocks.of_all[0]) > 2.0:
            break
    stats = stats_of(llm)
    assert stats["accepted_tokens"] > stats["free_accepted_tokens"] > 0
    assert min(planner.texts.of_all[0], planner.blocks.of_all[0]) > 2.0
    assert (proposer_of(llm).slots.overall[:, 0] > 0.0).all()  # the device learns by itself
