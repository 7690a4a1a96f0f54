"""Drafts that are drawn with the noise of verification are accepted more often, and change nothing.

With `--slow -s`, it prints the tokens of a verification at several temperatures.
"""

from __future__ import annotations

import pytest
from vllm import LLM, SamplingParams

from support import DEMO
from support.engines import FIXED, engine, held_out_prompts

pytestmark = pytest.mark.v2


def run(llm: LLM, requests: int, tokens: int, temperature: float) -> tuple[list[list[int]], float]:
    """Return the texts, and tokens per verification."""
    before = counts(llm)
    params = [
        SamplingParams(max_tokens=tokens, temperature=temperature, seed=seed, ignore_eos=True)
        for seed in range(requests)
    ]
    outputs = llm.generate(held_out_prompts(requests), params, use_tqdm=False)
    verified, accepted = (after - old for after, old in zip(counts(llm), before, strict=True))
    return [list(one.outputs[0].token_ids) for one in outputs], 1 + accepted / verified


def counts(llm: LLM) -> tuple[int, int]:
    (found,) = llm.collective_rpc("dflash_stats")
    return found["verifications"], found["accepted_tokens"]


@pytest.mark.parametrize(
    "drafter",
    ["drafter", *(pytest.param(n, marks=pytest.mark.slow) for n in ("drafter2", "lilicorr"))],
)
@pytest.mark.parametrize(
    ("requests", "tokens", "temperatures"),
    [
        (6, 12, [1.0]),
        pytest.param(24, 48, [0.0, 0.7, 1.0], marks=pytest.mark.slow),
    ],
)
def test_more_of_them_are_accepted(
    drafter: str, requests: int, tokens: int, temperatures: list[float]
) -> None:
    """Drafters whose rows know nothing of each other, and drafters that walk."""
    found = {}
    for method in ("greedy", "probabilistic"):
        asked = {**FIXED, "model": str(DEMO / drafter), "draft_sample_method": method}
        with engine(max_num_seqs=requests, speculative_config=asked) as llm:
            found[method] = [run(llm, requests, tokens, each) for each in temperatures]
    for temperature, most_likely, drawn in zip(
        temperatures, found["greedy"], found["probabilistic"], strict=True
    ):
        print(f"{drafter}, temperature {temperature}: {most_likely[1]:.3f} -> {drawn[1]:.3f}")
        assert drawn[0] == most_likely[0]
        assert drawn[1] == most_likely[1] if temperature == 0.0 else drawn[1] > most_likely[1]
