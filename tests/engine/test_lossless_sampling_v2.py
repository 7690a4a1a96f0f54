"""At temperature 1 on Model Runner V2, the text has plain decoding's distribution.

`test_lossless_sampling.py` tests this on V1. Here the device picks the drafts to verify, by chances
that depend on what the drafter and the texts say. If it looked at what the target draws, this
would show it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from vllm import SamplingParams

from support.chi_square import p_value
from support.device_decisions import directed, prefer
from support.engines import DFLASH, engine, fix_costs, held_out_prompts, proposer_of
from support.trimming import trimming
from vllm_dflash.planning.ahead import PlanAhead

pytestmark = [
    pytest.mark.v2,
    pytest.mark.slow,  # half an hour: a token is drawn from 2,048 in the interpreter
]
SAMPLES, REQUESTS, NEW_TOKENS = 800, 32, 6
EACH = 2
"""Mean number of a request's seven drafts that a step verifies."""


def continuations(speculative: dict[str, Any] | None) -> tuple[list[tuple[int, ...]], Any]:
    """Continue one prompt many times, each with its own seed."""
    prompt = held_out_prompts(1)[0] * 2  # twice, so that its text predicts something
    first_seed = 1_000_000 if speculative else 0
    params = [
        SamplingParams(
            temperature=1.0,
            max_tokens=NEW_TOKENS,
            ignore_eos=True,
            seed=first_seed + number,
        )
        for number in range(SAMPLES)
    ]
    settings = {"max_num_seqs": REQUESTS, "speculative_config": speculative}
    with pytest.MonkeyPatch.context() as patch, trimming(with_kernel=False):
        fix_costs(patch)
        with engine("asynchronous", **settings) as llm:
            if speculative:
                prefer(llm, patch, text=0.6, block=0.5)
                directed(
                    llm, patch, lambda most: PlanAhead(most, True, min_verified=EACH * len(most))
                )
            outputs = llm.generate([prompt] * SAMPLES, params, use_tqdm=False)
            stats = proposer_of(llm).statistics if speculative else None
    return [tuple(output.outputs[0].token_ids) for output in outputs], stats


def compared(sample: list[tuple[int, ...]]) -> list[Counter]:
    """Count the tokens at three places, after different numbers of drafts."""
    return [Counter((tokens[place],) for tokens in sample) for place in (1, 2, 4)]


@pytest.fixture(scope="module")
def plain() -> list[tuple[int, ...]]:
    return continuations(None)[0]


def test_what_the_device_picks_leaves_the_distribution_as_it_is(
    plain: list[tuple[int, ...]],
) -> None:
    ours, stats = continuations(dict(DFLASH))
    assert 0 < stats.free_draft_tokens < stats.draft_tokens
    assert stats.accepted_tokens > SAMPLES / 4
    # It trims: far fewer are verified than the seven that each request has.
    assert stats.to_dict()["mean_draft_length"] < 4
    values = [p_value(*pair) for pair in zip(compared(plain), compared(ours), strict=True)]
    assert min(values) > 0.01
