"""Drafts that are drawn with the noise of verification are accepted more often, and change nothing.

`pytest -s` shows the tokens of each verification.
"""

from __future__ import annotations

import pytest
from vllm import LLM, SamplingParams

from support import DEMO
from support.engines import FIXED, engine, held_out_prompts

pytestmark = pytest.mark.v2
REQUESTS = 24
TEMPERATURES = 0.0, 0.7, 1.0


def run(llm: LLM, temperature: float, *, tokens: int) -> tuple[list[list[int]], float]:
    """Return the texts, and tokens per verification."""
    before = counts(llm)
    params = [
        SamplingParams(max_tokens=tokens, temperature=temperature, seed=seed, ignore_eos=True)
        for seed in range(REQUESTS)
    ]
    outputs = llm.generate(held_out_prompts(REQUESTS), params, use_tqdm=False)
    verified, accepted = (after - old for after, old in zip(counts(llm), before, strict=True))
    return [list(one.outputs[0].token_ids) for one in outputs], 1 + accepted / verified


def counts(llm: LLM) -> tuple[int, int]:
    (found,) = llm.collective_rpc("dflash_stats")
    return found["verifications"], found["accepted_tokens"]


@pytest.mark.parametrize(
    "drafter",
    [
        "drafter",
        "drafter2",
        pytest.param("lilicorr", marks=pytest.mark.slow),
    ],
)
def test_more_of_them_are_accepted(drafter: str, request: pytest.FixtureRequest) -> None:
    """Of drafters whose rows know nothing of each other, and of those that walk."""
    is_slow = request.config.getoption("--slow")
    config = {**FIXED, "model": str(DEMO / drafter)}
    texts, lengths = {}, {}
    for method in ("greedy", "probabilistic"):
        asked = {**config, "draft_sample_method": method}
        with engine(max_num_seqs=REQUESTS, speculative_config=asked) as llm:
            for temperature in TEMPERATURES:
                found = run(llm, temperature, tokens=48 if is_slow else 16)
                texts[method, temperature], lengths[method, temperature] = found
    for temperature in TEMPERATURES:
        greedy, drawn = (lengths[method, temperature] for method in ("greedy", "probabilistic"))
        print(f"{drafter}, temperature {temperature}: {greedy:.3f} -> {drawn:.3f}")
        assert texts["greedy", temperature] == texts["probabilistic", temperature]
        assert drawn == greedy if temperature == 0.0 else drawn > greedy
