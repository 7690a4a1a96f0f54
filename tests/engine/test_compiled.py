"""Compiled engines, which are vLLM's default: the same tokens, and compiled only once."""

import pytest
from torch._dynamo.callback import callback_handler
from vllm.platforms import current_platform

from support.engines import (
    DFLASH,
    engine,
    fix_costs,
    greedy,
    held_out_prompts,
    proposer_of,
    token_ids,
)


def test_hazard_10_no_recompilation_after_warm_up(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whatever the batch size, the draft length or the phase."""
    fix_costs(monkeypatch)
    monkeypatch.setenv("VLLM_DISABLE_COMPILE_CACHE", "1")
    compilations: list[object] = []
    count = callback_handler.register_start_callback(compilations.append)
    prompts = held_out_prompts(36)
    try:
        with engine(
            speculative_config=DFLASH,
            enforce_eager=False,
            max_num_seqs=32,
            max_num_batched_tokens=64,
        ) as llm:
            compilations_at_start = len(compilations)
            for batch in (1, 2, 3, 7, 16, 36):
                for max_tokens in (1, 2, 5, 30):
                    tokens = token_ids(llm, prompts[:batch], greedy(max_tokens))
                if batch == 1:  # in larger ones, drafts are shorter, so that nobody waits
                    (alone,) = llm.collective_rpc("dflash_stats")
            assert len(compilations) == compilations_at_start
            (stats,) = llm.collective_rpc("dflash_stats")
            assert proposer_of(llm).model.block.do_not_compile == current_platform.is_cpu()
        log = "".join(capfd.readouterr())
    finally:
        callback_handler.remove_start_callback(count)
    assert compilations_at_start >= 1  # the target, so the counting works
    assert "Traceback" not in log
    assert alone["mean_acceptance_length"] > 2
    assert stats["mean_acceptance_length"] > 1.5
    assert sum(count > 10 for count in stats["draft_lengths"]) >= 4
    assert stats["drafted_steps"] > 0
    with engine(max_num_seqs=16, max_num_batched_tokens=128) as llm:
        plain = token_ids(llm, prompts, greedy(30))
    assert tokens == plain
