"""Random mixtures of requests get plain decoding's answers, whatever they ask for.

Each request of a mixture is compared with plain decoding of that request alone. Its answer must
not depend on what its neighbours ask for, on which requests have drafts in a step and how many, on
a prompt or a preemption beside it, or on who hangs up. `reliability.md` says what was found.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from vllm import LLM

from support.context_rows import ContextRows
from support.crossed_requests import (
    REASONING,
    TOKENS,
    Answer,
    Mixture,
    answer_alone,
    beyond_limits,
    check_order,
    each_alone,
    mixture,
    serve,
    wrong_answers,
)
from support.engines import (
    DFLASH,
    FIXED,
    USES_V2,
    acceptance_by_request,
    engine,
    fix_costs,
    scheduler_of,
)
from support.planner_world import curve
from vllm_dflash.planning.costs import StepCosts

pytestmark = pytest.mark.usefixtures("runner")
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 96,  # so that prompts come in chunks, beside others' drafts
    "reasoning_config": REASONING,
}
LITTLE = {"num_gpu_blocks_override": 8, "max_model_len": 160}
"""Cache for half of the requests: the others wait, or are preempted."""
NEVER_PAYS = "drafts never pay"
ENGINES = (
    (
        "asynchronous, adaptive, little cache",
        pytest.param("synchronous, fixed", marks=pytest.mark.slow),
    )
    if USES_V2
    else (
        "adaptive, little cache",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("adaptive", "fixed", NEVER_PAYS)),
    )
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
    settings = {**SETTINGS, **(LITTLE if "little" in kind else {})}
    with pytest.MonkeyPatch.context() as patch:
        fix_costs(patch)
        if kind == NEVER_PAYS:
            from vllm_dflash.engine.v1.v1_worker import V1CPUWorker

            patch.setattr(V1CPUWorker, "measure", lambda self: never_paying())
        speculative = FIXED if kind.endswith("fixed") else DFLASH
        with engine(scheduling, speculative_config=speculative, **settings) as started:
            yield started


def test_hazard_6_answers_are_plain_decodings(
    llm: LLM, expected: list[Expected], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each step, the drafter has the context of each request; at the end, nothing is left."""
    wrong, context, scheduler = [], ContextRows(llm), scheduler_of(llm)
    verified = acceptance_by_request(llm, of_drafts=True)
    preempted, preempt = list[Any](), scheduler._preempt_request

    def noted(*args: Any, **named: Any) -> None:
        preempted.append(args)
        preempt(*args, **named)

    monkeypatch.setattr(scheduler, "_preempt_request", noted)

    def check() -> None:
        assert not context.missing()

    for number, (mix, answers) in enumerate(expected):
        verified.clear()
        found = serve(llm, mix, resets=True, check=check)
        faults = [*wrong_answers(mix, found, answers), *beyond_limits(mix, verified)]
        wrong += [f"mixture {number - 1}, {one}" for one in faults]
        check_order(llm)
    assert not wrong, "\n".join(wrong)
    (stats,) = llm.collective_rpc("dflash_stats")
    assert stats["accepted_tokens"] - stats["free_accepted_tokens"] > TOKENS
    assert stats["free_draft_tokens"] > stats["free_accepted_tokens"] > 0
    assert stats["nan_drafts"] == stats["captures_after_warmup"] == 0
    assert len(preempted) > 5
