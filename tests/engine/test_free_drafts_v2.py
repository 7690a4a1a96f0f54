"""What a request's own text foretells, on Model Runner V2 under synchronous scheduling."""

from __future__ import annotations

from typing import Any

import pytest

from support.engines import (
    DFLASH,
    engine,
    greedy,
    held_out_prompts,
    proposer_of,
    token_ids,
)
from support.forced_texts import ForcedTexts

pytestmark = [
    pytest.mark.parametrize("runner", ["v2"], indirect=True),
    pytest.mark.usefixtures("runner"),
]
PROMPTS = [prompt + prompt for prompt in held_out_prompts(3)]
NEW_TOKENS = 24
SETTINGS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 3, "max_num_batched_tokens": 64}


def test_forced_ones_of_any_length_beside_blocks() -> None:
    params = greedy(NEW_TOKENS, ignore_eos=True)
    with engine("synchronous", **SETTINGS) as llm:
        plain = token_ids(llm, PROMPTS, params)
    with engine("synchronous", speculative_config=dict(DFLASH), **SETTINGS) as llm:
        speculator = proposer_of(llm)
        for whole in (True, False):
            llm.reset_prefix_cache()
            speculator.clear_statistics()
            speculator.lengths.policy = ForcedTexts(speculator.num_speculative_steps, whole=whole)
            assert token_ids(llm, PROMPTS, params) == plain
            (stats,) = llm.collective_rpc("dflash_stats")
            assert 0 < stats["free_accepted_tokens"] <= stats["free_draft_tokens"]
            assert (stats["drafted_steps"] == 0) == whole
            assert (stats["draft_tokens"] == stats["free_draft_tokens"]) == whole
            assert stats["captures_after_warmup"] == stats["reallocations_after_warmup"] == 0


def test_what_others_were_answered() -> None:
    """The same requests again, each in another's place."""
    params, asked = greedy(NEW_TOKENS, ignore_eos=True), {**DFLASH, "free_drafts": "shared"}
    with engine("synchronous", speculative_config=asked, **SETTINGS) as llm:
        speculator = proposer_of(llm)
        speculator.lengths.policy = ForcedTexts(speculator.num_speculative_steps, whole=True)
        written, accepted = [], []
        for prompts in (PROMPTS, PROMPTS[::-1]):
            speculator.clear_statistics()
            written.append(token_ids(llm, prompts, params))
            (stats,) = llm.collective_rpc("dflash_stats")
            accepted.append(stats["free_accepted_tokens"])
    assert written[1] == written[0][::-1]
    assert accepted[1] > max(accepted[0], 0.6 * NEW_TOKENS * len(PROMPTS))
    assert stats["captures_after_warmup"] == stats["reallocations_after_warmup"] == 0


def test_asynchronous_scheduling_looks_nothing_up() -> None:
    """A step is scheduled before the text it goes on from is known."""
    with engine("asynchronous", speculative_config=dict(DFLASH), **SETTINGS) as llm:
        assert proposer_of(llm).texts is None
