"""Where drafts are put: behind their request's context, in blocks of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import FIXED, engine, greedy, proposer_of, token_ids
from pairs import drafter_config, save_drafter
from targets import make_target
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


def test_null_blocks_of_a_sliding_target_are_never_written(tmp_path: Path) -> None:
    """Hazard 8: the target gives up blocks behind its window of 24; the drafter keeps its own."""
    make_target(tmp_path / "target", "mistral")
    save_drafter(tmp_path / "drafter", drafter_config())
    prompts = [{"prompt_token_ids": [(7 * n + 3 * i) % 300 for i in range(n)]} for n in (9, 150)]
    params = greedy(24, detokenize=False, ignore_eos=True)
    settings: dict[str, Any] = {"model": str(tmp_path / "target"), "skip_tokenizer_init": True}
    settings |= {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    speculative = {**FIXED, "model": str(tmp_path / "drafter")}
    with engine(**settings) as llm:
        expected = token_ids(llm, prompts, params)
    with engine(**settings, speculative_config=speculative) as llm:
        seen = watch(llm)
        context = proposer_of(llm).model.context
        slots = []
        store = context.store
        context.store = lambda *rows: (slots.extend(rows[2].tolist()), store(*rows))
        assert token_ids(llm, prompts, params) == expected
        caches = [attention.attn.kv_cache for attention in context.attentions]
        assert all((cache[0] == 0).all() for cache in caches)
    assert len(slots) >= 159
    assert min(slots) >= BLOCK
    assert all(written <= own and 0 not in written for _, written, own in seen)
