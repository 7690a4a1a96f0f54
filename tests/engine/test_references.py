"""Engines write what the reference writes, and each step accepts as much: all kinds of drafters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from reference.reference_drafter import ReferenceDrafter
from support import DEMO
from support.engines import (
    DFLASH,
    FIXED,
    TARGET,
    USES_V2,
    acceptance_by_request,
    counted,
    engine,
    fix_costs,
    greedy,
    held_out_prompts,
    in_order,
    slow_on_v2,
    token_ids,
)
from support.reference_decoding import generate
from vllm_dflash.checkpoint.read import read_drafter

pytestmark = pytest.mark.usefixtures("runner")
NEW_TOKENS, PROMPTS = (24, held_out_prompts(4)) if USES_V2 else (48, held_out_prompts(12))
ANCHORED = "sampled from anchors"
"""Blocks of 8 rows have 8 drafts. The drafter was not trained so."""
DRAFTERS: dict[str, tuple[str, float]] = {
    "DFlash": ("drafter", 1.8 if USES_V2 else 2.5),
    "DFlash 2": ("drafter2", 1.8 if USES_V2 else 2.2),
    "LiLiCorr": ("lilicorr", 1.7 if USES_V2 else 2.2),
    ANCHORED: ("drafter", 1.0),
}
"""Folders, and the least tokens of a verification: short texts end within their last drafts."""


@pytest.mark.parametrize(
    "kind", [pytest.param(n, marks=[] if n == "DFlash 2" else slow_on_v2) for n in DRAFTERS]
)
def test_each_step_accepts_what_the_reference_accepts(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several requests at once and in chunks. With planned lengths, the text is the same."""
    name, least = DRAFTERS[kind]
    spec, more = read_drafter(str(DEMO / name)), dict[str, Any](model=str(DEMO / name))
    if kind == ANCHORED:
        spec = spec.model_copy(update={"sample_from_anchor": True})
        more["drafter_overrides"] = {"dflash_config": {"sample_from_anchor": True}}
    target = Qwen3ForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    reference = ReferenceDrafter.load(spec, DEMO / name).float()
    settings: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
    with engine(speculative_config=FIXED | more, **settings) as llm:
        lengths = acceptance_by_request(llm)
        outputs = llm.generate(PROMPTS, greedy(NEW_TOKENS), use_tqdm=False)
        (stats,) = llm.collective_rpc("dflash_stats")
        ends = {llm.get_tokenizer().eos_token_id}
    for output, found in zip(outputs, in_order(lengths), strict=True):
        prompt, text = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
        expected = generate(
            target, reference, prompt, NEW_TOKENS, whole_blocks=USES_V2, stop_ids=ends
        )
        assert text == expected.tokens
        assert counted(found, text) == counted(expected.acceptance_lengths, text)
    assert stats["mean_acceptance_length"] > least
    assert stats["nan_drafts"] == 0
    assert stats["captures_after_warmup"] == stats["reallocations_after_warmup"] == 0
    if kind == ANCHORED:
        assert stats["draft_tokens"] > 7 * stats["verifications"]
    if kind != "DFlash":  # test_engine.py does this one
        fix_costs(monkeypatch)
        with engine(speculative_config=DFLASH | more, **settings) as llm:
            written = token_ids(llm, PROMPTS, greedy(NEW_TOKENS))
            (stats,) = llm.collective_rpc("dflash_stats")
        assert written == [list(output.outputs[0].token_ids) for output in outputs]
        assert stats["drafted_steps"] > 0
