"""`"draft_window": "auto"` in engines on either model runner."""

from __future__ import annotations

from typing import Any

import pytest

from support.engines import DFLASH, FIXED, engine, fix_costs, greedy, held_out_prompts, token_ids
from support.log_lines import log_lines
from vllm_dflash.planning import window

pytestmark = [pytest.mark.usefixtures("runner"), pytest.mark.also_emulated]
LEAST_CONTEXT = 64


@pytest.mark.parametrize("own", [DFLASH, FIXED], ids=["adaptive", "fixed"])
def test_both_ways_are_tried_measured_and_reported(
    own: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fix_costs(monkeypatch)
    monkeypatch.setattr(window, "TOKENS", (32,))
    monkeypatch.setattr(window, "LEAST_CONTEXT", LEAST_CONTEXT)
    monkeypatch.setattr(window, "FIRST_STEPS", 4)
    monkeypatch.setattr(window, "TRIAL_STEPS", 4)
    monkeypatch.setattr(window, "PROBE_STEPS", 4)
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "0.1")
    prompts = held_out_prompts(3)
    settings: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 3}
    params = greedy(180, ignore_eos=True)
    with engine(**settings) as llm:
        plain = token_ids(llm, prompts, params)
    speculative = {**own, "free_drafts": "off", "draft_window": "auto"}
    with log_lines() as lines, engine(**settings, speculative_config=speculative) as llm:
        for _ in range(3):
            assert token_ids(llm, prompts, params) == plain
            (stats,) = llm.collective_rpc("dflash_stats")
            if any(min(one["timed_steps"]) >= 2 for one in stats["draft_windows"][:1]):
                break
    assert stats["captures_after_warmup"] == stats["reallocations_after_warmup"] == 0
    assert stats["nan_drafts"] == 0
    first, *_ = stats["draft_windows"]
    assert first["context"] == [LEAST_CONTEXT, 2 * LEAST_CONTEXT]
    assert first["window"] in (0, 32)
    assert min(first["timed_steps"]) >= 2
    assert min(first["block_ms"]) > 0.0
    assert min(first["accepted"]) > 0.3
    if own is DFLASH:
        assert stats["step_seconds"] > stats["planning_seconds"] > 0.0
        assert any("DFlash windows: 64 to 127 tokens: " in line for line in lines)
