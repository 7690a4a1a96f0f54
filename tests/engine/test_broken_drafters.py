"""Drafters with worthless drafts: the output is plain decoding's, and a warning is logged."""

from pathlib import Path
from typing import Any

import pytest
import torch

from support.engines import (
    FIXED,
    TARGET,
    USES_V2,
    engine,
    greedy,
    held_out_prompts,
    proposer_of,
    slow_on_v2,
    token_ids,
)
from support.pairs import drafter_config, save_drafter
from vllm_dflash.engine.reporting.log import logger
from vllm_dflash.engine.v1.block_forward import BlockDrafts

pytestmark = pytest.mark.usefixtures("runner")
PROMPTS, PARAMS = held_out_prompts(4), greedy(20)


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    with engine() as llm:
        return token_ids(llm, PROMPTS, PARAMS)


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Warnings of our logger. (vLLM drops foreign handlers when an engine starts.)"""
    messages: list[str] = []
    monkeypatch.setattr(logger(), "warning", lambda text, *values: messages.append(text % values))
    return messages


def test_a_broken_drafter_warns_and_harms_nobody(
    plain: list[list[int]], warnings: list[str]
) -> None:
    """Half of the logits are NaN; the output stays plain decoding's, and each is counted once."""
    rows, kept = list[int](), list[int]()
    with engine(speculative_config=dict(FIXED), max_num_seqs=4) as llm:
        model = proposer_of(llm).model
        compute = model.compute_logits

        def broken(hidden: torch.Tensor) -> torch.Tensor:
            logits = compute(hidden)
            logits[1::2] = torch.nan
            rows.append(len(logits))
            return logits

        model.compute_logits = broken
        if not USES_V2:
            block = proposer_of(llm).host.block
            draft = block.draft

            def noted(*inputs: Any) -> BlockDrafts:
                drafts = draft(*inputs)
                kept.extend(map(len, drafts.tokens))
                return drafts

            block.draft = noted
        for _ in range(4):
            assert token_ids(llm, PROMPTS, PARAMS) == plain
            if warnings:
                break
        (stats,) = llm.collective_rpc("dflash_stats")
    if USES_V2:  # the last block of a request is not reported
        broken_rows = sum(count // 2 for count in rows)
        assert broken_rows / 2 < stats["nan_drafts"] <= broken_rows
    else:  # with the drafts after them
        assert stats["nan_drafts"] == sum(rows) - sum(kept)
    assert stats["accepted_tokens"] > 0  # drafts before a broken one
    assert sum("not finite" in warning for warning in warnings) == 1
    assert f"--target {TARGET}" in warnings[-1]


@slow_on_v2
def test_a_drafter_of_another_target_warns(
    tmp_path: Path,
    plain: list[list[int]],
    warnings: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Random weights that fit the demo target's shape."""
    monkeypatch.setattr("vllm_dflash.engine.reporting.log.ENOUGH_VERIFICATIONS", 40)
    config = drafter_config(vocab_size=2048, target_hidden_size=256, hidden_size=256)
    config |= {"num_target_layers": 6}
    save_drafter(tmp_path, config)
    speculative = {**FIXED, "model": str(tmp_path)}
    with engine(speculative_config=speculative, max_num_seqs=4) as llm:
        for _ in range(4):
            assert token_ids(llm, PROMPTS, PARAMS) == plain
            if warnings:
                break
    assert sum("0 were accepted" in warning for warning in warnings) == 1
