"""At temperature 1, text written with adaptive drafting has plain decoding's distribution.

A chi-square test compares two samples of continuations of one prompt. Seeds and the planner's
costs are fixed, so a p-value is the same number in every run.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from support.chi_square import compared, p_value
from support.engines import DFLASH, engine, held_out_prompts, proposer_of
from support.forced_texts import ForcedTexts
from support.planner_world import CONTEXT_MS, curve
from vllm_dflash.config.engine_options import MOST_FREE_DRAFTS
from vllm_dflash.engine.cadence import Cadence
from vllm_dflash.planning.costs import StepCosts
from vllm_dflash.planning.planner import Planner
from vllm_dflash.planning.step import StepRecord

SAMPLES, REQUESTS = 1500, 16
NEW_TOKENS = 7


class PlannerByTheBook(Planner):
    """Plans from costs that do not depend on the machine and make cutting drafts worthwhile."""

    def __init__(self) -> None:
        verify, draft = {1: 12.0, 16: 12.1, 64: 13.0, 256: 19.0}, {2: 0.1, 256: 0.5}
        costs = StepCosts(curve(verify), curve(draft), curve(CONTEXT_MS), REQUESTS)
        super().__init__(7, REQUESTS, costs, most_free=MOST_FREE_DRAFTS)

    def record_step(self, step: StepRecord) -> None:
        """Learn nothing."""


def continuations(
    first_seed: int,
    speculative: dict[str, Any] | None,
    make_policy: Callable[[], Planner] = PlannerByTheBook,
    *,
    seeded: bool = True,
) -> tuple[list, dict]:
    """Return many continuations of one prompt, and our counters. Each has its own seed, or all use
    one generator."""
    prompt = held_out_prompts(1)[0]
    common = SamplingParams(temperature=1.0, top_k=12, max_tokens=NEW_TOKENS, ignore_eos=True)
    params = [common.clone() for _ in range(SAMPLES)]
    if seeded:
        for number, one in enumerate(params):
            one.seed = first_seed + number
    with engine(speculative_config=speculative, max_num_seqs=REQUESTS) as llm:
        if speculative:
            proposer = proposer_of(llm)
            proposer.host.planner = make_policy()
        torch.manual_seed(first_seed)
        outputs = llm.generate([prompt] * SAMPLES, params, use_tqdm=False)
        stats = llm.collective_rpc("dflash_stats")[0] if speculative else {}
    return [tuple(output.outputs[0].token_ids) for output in outputs], stats


@pytest.fixture(scope="module")
def plain() -> list[tuple[int, ...]]:
    return continuations(0, None)[0]


def test_adaptive_drafting_leaves_the_distribution_as_it_is(
    plain: list[tuple[int, ...]],
) -> None:
    ours, stats = continuations(1_000_000, dict(DFLASH))
    # Drafts were cut to several lengths: that is what is being tested.
    assert sum(count > 50 for count in stats["draft_lengths"]) >= 3
    assert stats["accepted_tokens"] > SAMPLES
    values = [p_value(*pair) for pair in zip(compared(plain), compared(ours), strict=True)]
    assert min(values) > 0.01


def test_free_drafts_leave_the_distribution_as_it_is(
    plain: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forced free drafts of any length, beside blocks, in every step, however busy the machine."""
    monkeypatch.setattr(Cadence, "interval", lambda _: 1)
    ours, stats = continuations(1_000_000, dict(DFLASH), lambda: ForcedTexts(7))
    assert stats["free_accepted_tokens"] > SAMPLES / 10
    values = [p_value(*pair) for pair in zip(compared(plain), compared(ours), strict=True)]
    assert min(values) > 0.01
