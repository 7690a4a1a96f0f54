"""Random mixtures of requests get plain decoding's answers, whatever they ask for.

Each request of a mixture is compared with plain decoding of that request alone. Its answer must
not depend on what its neighbours ask for, on which requests have drafts in a step and how many, or
on a prompt or a preemption beside it. `reliability.md` says what was found.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from vllm import LLM

from support.crossed_requests import (
    REASONING,
    TOKENS,
    Answer,
    Mixture,
    answer_alone,
    difference,
    each_alone,
    mixture,
    serve,
)
from support.engines import DFLASH, FIXED, USES_V2, engine, fix_costs, scheduler_of
from support.planner_world import curve
from vllm_dflash.planning.costs import StepCosts

pytestmark = pytest.mark.usefixtures("runner")
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 96,  # so that prompts come in chunks, beside others' drafts
    "reasoning_config": REASONING,
}
NEVER_PAYS = "drafts never pay"
ENGINES = (
    (pytest.param("synchronous, fixed", marks=pytest.mark.slow), "asynchronous, adaptive")
    if USES_V2
    else ("adaptive", *(pytest.param(n, marks=pytest.mark.slow) for n in ("fixed", NEVER_PAYS)))
)
MIXTURES = 3 if USES_V2 else 16
MANY = 20 if USES_V2 else 200
"""Mixtures with `--slow`."""


class Expected(NamedTuple):
    """A mixture, and what plain decoding answers to each of its requests alone."""

    mix: Mixture
    answers: list[Answer]


@pytest.fixture(scope="module")
def expected(request: pytest.FixtureRequest) -> list[Expected]:
    is_slow = request.config.getoption("--slow")
    mixes = [each_alone(), *map(mixture, range(MANY if is_slow else MIXTURES))]
    with engine(**SETTINGS) as llm:
        return [Expected(mix, [answer_alone(llm, one) for one in mix.requests]) for mix in mixes]


def never_paying() -> StepCosts:
    """Return costs at which a row costs as much as the step without it: only probes are drafted."""
    return StepCosts(
        curve({1: 1.0, 1000: 1000.0}),
        curve({1: 500.0, 1000: 1000.0}),
        curve({1: 0.1, 1000: 0.2}),
        8,
    )


@pytest.fixture(scope="module", params=ENGINES)
def llm(request: pytest.FixtureRequest, expected: list[Expected]) -> Iterator[LLM]:
    """An engine that starts after the plain one has ended."""
    kind = request.param
    scheduling = kind.partition(",")[0] if USES_V2 else ""
    with pytest.MonkeyPatch.context() as patch:
        fix_costs(patch)
        if kind == NEVER_PAYS:
            from vllm_dflash.engine.v1.v1_worker import V1CPUWorker

            patch.setattr(V1CPUWorker, "measure", lambda self: never_paying())
        speculative = FIXED if kind.endswith("fixed") else DFLASH
        with engine(scheduling, speculative_config=speculative, **SETTINGS) as started:
            yield started


def test_answers_are_plain_decodings(llm: LLM, expected: list[Expected]) -> None:
    wrong = []
    for number, (mix, answers) in enumerate(expected):
        found = serve(llm, mix, resets=True)
        for one, ours, plains in zip(mix.requests, found, answers, strict=True):
            if why := difference(ours, plains):
                wrong.append(f"mixture {number - 1}, {one.about}: {why}")
    assert not wrong, "\n".join(wrong)
    assert not scheduler_of(llm).requests
    (stats,) = llm.collective_rpc("dflash_stats")
    assert stats["accepted_tokens"] > TOKENS
    assert stats["captures_after_warmup"] == 0
