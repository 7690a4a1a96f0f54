"""Blocks that a target with windows gives up: null blocks stand in their places."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.drafter_watch import watch_drafts
from support.engines import FIXED, USES_V2, engine, greedy, proposer_of, scheduler_of
from support.pairs import drafter_config, save_drafter
from support.stepped_requests import Stepped
from support.targets import continued, make_target

pytestmark = [pytest.mark.usefixtures("runner"), pytest.mark.also_emulated]


def test_hazard_8_null_blocks_are_never_written(tmp_path: Path) -> None:
    """On V2 the target gives up blocks before its window; on V1 all layers share one group."""
    target = make_target(tmp_path / "target", "mistral")
    sliding = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 20}
    save_drafter(tmp_path / "drafter", drafter_config(**sliding))
    prompts = [[(7 * n + 3 * i) % 300 for i in range(n)] for n in (9, 150)]
    with engine(
        model=str(tmp_path / "target"),
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        speculative_config={**FIXED, "model": str(tmp_path / "drafter")},
    ) as llm:
        manager = scheduler_of(llm).kv_cache_manager
        stepped, given_up = Stepped(llm), list[bool]()

        def check() -> None:
            for group in manager.coordinator.single_type_managers:
                for blocks in group.req_to_blocks.values():
                    given_up.extend(block.is_null for block in blocks)

        for number, prompt in enumerate(prompts):
            stepped.add(str(number), prompt, greedy(16, ignore_eos=True))
        with watch_drafts(llm) as seen:
            stepped.finish(check)
        caches = [a.attn.kv_cache for a in proposer_of(llm).model.context.attentions]
        assert all((cache[0] == 0).all() for cache in caches)
        assert all((cache[1:] != 0).any() for cache in caches)
    assert any(given_up) == USES_V2
    assert len({draft.request for draft in seen}) == len(prompts)
    assert all(0 not in draft.written for draft in seen)
    for number, prompt in enumerate(prompts):
        assert prompt + stepped.tokens(str(number)) == continued(target, prompt, 16)
