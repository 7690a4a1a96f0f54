"""Where drafts are put: behind their request's context, in blocks of its own."""

from __future__ import annotations

from typing import Any

import pytest
from engines import FIXED, engine, greedy, proposer_of, token_ids
from vllm import LLM

pytestmark = pytest.mark.engine
BLOCK = 32  # tokens, of `engine`
LENGTHS = (1, 24, 25, 31, 32, 33, 63, 64, 96)


def watch(llm: LLM) -> list[tuple[str, set[int], set[int]]]:
    """Every draft of every request: its name, blocks it writes to, blocks that are its own."""
    proposer: Any = proposer_of(llm)
    runner = proposer.runner
    seen: list[tuple[str, set[int], set[int]]] = []
    draft = proposer.block.draft

    def watched(inputs: Any, block_table: Any) -> Any:
        ends = inputs.query_start_loc
        taken: set[int] = set()
        for row, start, end in zip(inputs.requests, ends, ends[1:], strict=False):
            name = runner.input_batch.req_ids[row]
            own = set(runner.requests[name].block_ids[proposer.kv_cache_gid])
            written = set((inputs.slots[start:end] // BLOCK).tolist())
            assert not written & taken  # no two requests draft into one block
            taken |= written
            seen.append((name, written, own))
        return draft(inputs, block_table)

    proposer.block.draft = watched
    return seen


def test_first_drafts_have_blocks_of_their_own() -> None:
    """Hazard 9: a prompt that fills its last block, cached ones among them, has lookahead."""
    shared = [7 * i % 300 + 10 for i in range(96)]
    prompts = [{"prompt_token_ids": shared[:length]} for length in LENGTHS]
    params = greedy(12, ignore_eos=True)
    with engine() as llm:
        expected = token_ids(llm, prompts, params)
    with engine(speculative_config=dict(FIXED), max_num_seqs=8) as llm:
        seen = watch(llm)
        assert token_ids(llm, prompts, params) == expected
        assert token_ids(llm, prompts, params) == expected  # from cached prefixes
        assert (proposer_of(llm).model.context.attentions[0].attn.kv_cache[0] == 0).all()
    assert len({name for name, *_ in seen}) == 2 * len(LENGTHS)
    assert all(written <= own and 0 not in own for _, written, own in seen)
