"""Targets with linear attention on CPUs, with vLLM's kernels, which support only bfloat16.

So text may differ where two tokens are equally likely: each token must be plain vLLM's best, or
nearly. With a state in the wrong place, tokens are 0.5 to 5 nat below the best.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams

from support.engines import DFLASH, engine, greedy, nats_behind, prefix_cache_hits, proposer_of
from support.forced_drafts import forced_drafts
from support.forced_texts import ForcedTexts
from support.hybrids import know_qwen35
from support.pairs import drafter_config, save_drafter
from support.stepped_requests import Stepped
from support.targets import make_target
from vllm_dflash.planning.planner import Planner

NEW_TOKENS = 32
NEAR = 0.2
PROMPTS = [
    [(7 * row + 3 * i) % 300 for i in range(length)] for row, length in enumerate((9, 150, 400))
]
SETTINGS: dict[str, Any] = {"dtype": "bfloat16", "max_num_seqs": 3, "skip_tokenizer_init": True}
SETTINGS |= {"max_num_batched_tokens": 128}  # several chunks


def params() -> SamplingParams:
    """Return new parameters each time: `generate` changes them."""
    return greedy(NEW_TOKENS, detokenize=False, ignore_eos=True)


def serve(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    """Return the prompts with what was written after them."""
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(requests, params(), use_tqdm=False)
    return [[*one.prompt_token_ids, *one.outputs[0].token_ids] for one in outputs]


def next_turn(texts: list[list[int]]) -> list[list[int]]:
    """Return the next turn; one block was filled while drafts were accepted and rejected."""
    return [[*text, 7] for text in texts]


def preempted(llm: LLM) -> list[list[int]]:
    """Serve the prompts, but preempt them midway; one more request leaves for good."""
    stepped, names = Stepped(llm), ("0", "1", "2")
    for name, prompt in zip(("x", *names), (PROMPTS[1], *PROMPTS), strict=True):
        stepped.add(name, prompt, params())
    stepped.until(1, "x", "0")
    stepped.core.abort_request(["x"])
    assert stepped.core.reset_prefix_cache(reset_running_requests=True)
    stepped.finish()
    return [[*PROMPTS[int(name)], *stepped.tokens(name)] for name in names]


@pytest.mark.parametrize(  # V2 tests the other
    "family", [pytest.param("qwen3-next", marks=pytest.mark.slow), "qwen3.5"]
)
def test_drafts_of_any_length_leave_no_state_behind(tmp_path: Path, family: str) -> None:
    know_qwen35()
    make_target(tmp_path / "target", family)
    save_drafter(tmp_path / "drafter", drafter_config())
    settings = {**SETTINGS, "model": str(tmp_path / "target")}
    with engine(**settings) as llm:
        texts = serve(llm)
        serve(llm)
        serve(llm, next_turn(texts))
        plain_hits = prefix_cache_hits(llm)
    written: list[list[int]] = []
    speculative: dict[str, Any] = {**DFLASH, "model": str(tmp_path / "drafter")}
    with engine(speculative_config=speculative, **settings) as llm:
        proposer_of(llm).host.planner = Planner(7, 1)
        with forced_drafts(llm, texts, lambda place: place % 8):
            written += serve(llm)
            proposer_of(llm).host.planner = ForcedTexts(7)  # random requests and lengths
            written += serve(llm)
            written += serve(llm, next_turn(written[:3]))
            assert prefix_cache_hits(llm) == plain_hits
            written += preempted(llm)
        (stats,) = llm.collective_rpc("dflash_stats")
    assert plain_hits > 0
    assert stats["nan_drafts"] == 0
    assert stats["accepted_tokens"] > NEW_TOKENS
    assert stats["skipped_steps"] > 0
    prompts = [*PROMPTS * 2, *next_turn(texts), *PROMPTS]
    assert [len(text) for text in written] == [len(prompt) + NEW_TOKENS for prompt in prompts]
    with engine(**settings) as llm:
        behind = nats_behind(llm, written, NEW_TOKENS)
    assert len(behind) == 4 * len(PROMPTS) * NEW_TOKENS
    assert max(behind) < NEAR, behind
