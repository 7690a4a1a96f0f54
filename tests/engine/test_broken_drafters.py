"""Drafters with worthless drafts: the output is plain decoding's, and a warning is logged."""

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
from vllm_dflash.engine.reporting.log import logger
from vllm_dflash.engine.v1.block_forward import BlockDrafts

pytestmark = pytest.mark.usefixtures("runner")
PROMPTS, PARAMS = held_out_prompts(4), greedy(20)


@slow_on_v2
def test_a_broken_drafter_warns_and_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the logits are NaN; the output stays plain decoding's, and each is counted once."""
    rows, kept, warnings = list[int](), list[int](), list[str]()
    # vLLM drops foreign handlers when an engine starts.
    monkeypatch.setattr(logger(), "warning", lambda text, *values: warnings.append(text % values))
    with engine() as llm:
        plain = token_ids(llm, PROMPTS, PARAMS)
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
