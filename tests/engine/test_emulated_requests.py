"""Requests that ask for more than their text, on an emulated GPU."""

from __future__ import annotations

import pytest
from vllm import LLM

from support.emulated_runs import watched
from support.engines import DFLASH, engine, greedy
from support.schedules import NEW_TOKENS, ON_GPU, PROMPTS, SIZES

pytestmark = pytest.mark.emulated
SCORED = [65, 101, 7]
"""Tokens whose log-probabilities are asked for."""


def scores(llm: LLM) -> list[list[dict[int, float]]]:
    """Return the log-probabilities at each place of each prompt's text, by token."""
    params = [
        greedy(NEW_TOKENS, ignore_eos=True, logprob_token_ids=SCORED[: 1 + number])
        for number in range(len(PROMPTS))
    ]
    texts = [output.outputs[0].logprobs for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    return [
        [{token: one.logprob for token, one in place.items()} for place in text] for text in texts
    ]


def test_tokens_that_requests_name_are_scored_beside_trimmed_drafts() -> None:
    """Only the device knows which rows belong to which request; the host does not wait for that."""
    with engine(**SIZES, **ON_GPU) as llm:
        plain = scores(llm)
    with watched("others ahead", has_graphs=True, speculative_config=dict(DFLASH)) as llm:
        found = scores(llm)
    for of_prompt, of_plain in zip(found, plain, strict=True):
        for place, expected in zip(of_prompt, of_plain, strict=True):
            assert place == pytest.approx(expected, abs=1e-4)
