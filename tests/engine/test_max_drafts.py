"""Requests that limit their own drafts, beside some that do not, on a real engine."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from support.engines import (
    DFLASH,
    USES_V2,
    acceptance_by_request,
    engine,
    fix_costs,
    greedy,
    held_out_prompts,
    slow_on_v2,
    token_ids,
)

pytestmark = pytest.mark.usefixtures("runner")
PROMPTS = held_out_prompts(2) * 2 + [held_out_prompts(3)[-1] * 2]
MOST = [0, None, 2, 1, 0]
"""Limits of these requests; None: it sets none."""
SETTINGS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 5}
CASES = [
    pytest.param("fixed", "synchronous", marks=slow_on_v2),
    ("adaptive", "asynchronous" if USES_V2 else "synchronous"),
]


def limited(most: int | None) -> SamplingParams:
    extra_args = None if most is None else {"dflash": {"max_drafts": most}}
    return greedy(24 if USES_V2 else 48, ignore_eos=True, extra_args=extra_args)


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    """Texts of an engine that does not know the option, which must not break it."""
    with engine(**SETTINGS) as llm:
        return token_ids(llm, PROMPTS, [limited(most) for most in MOST])


@pytest.mark.parametrize(("draft_length", "scheduling"), CASES)
def test_no_more_drafts_are_verified_than_a_request_wants(
    plain: list[list[int]], draft_length: str, scheduling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts of blocks as of texts, which repeat themselves here."""
    fix_costs(monkeypatch)
    speculative = {**DFLASH, "draft_length": draft_length}
    with engine(scheduling, speculative_config=speculative, **SETTINGS) as llm:
        verified = acceptance_by_request(llm, of_drafts=True)
        assert token_ids(llm, PROMPTS, [limited(most) for most in MOST]) == plain
        most_of = {int(name.split("-")[0]): max(counts) for name, counts in verified.items()}
        assert most_of.keys() == {1, 2, 3}
        assert most_of[1] > 2
        assert (most_of[2], most_of[3]) == (2, 1)
        (before,) = llm.collective_rpc("dflash_stats")
        assert token_ids(llm, PROMPTS, limited(0)) == plain
        (after,) = llm.collective_rpc("dflash_stats")
        counted = "drafted_steps", "skipped_steps", "draft_tokens"
        assert [after[name] for name in counted] == [before[name] for name in counted]
        assert after["steps"] > before["steps"]
        with pytest.raises(VLLMValidationError, match=r"dflash\.max_drafts must be an integer"):
            llm.generate(PROMPTS[0], limited(-1), use_tqdm=False)
        assert token_ids(llm, PROMPTS[:1], limited(None)) == plain[:1]
