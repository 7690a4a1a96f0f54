"""Requests that are aborted midway do not affect those that stay or those that come later."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from vllm import LLM

from support.engines import (
    DFLASH,
    SCHEDULING,
    USES_V2,
    engine,
    fix_costs,
    greedy,
    held_out_prompts,
    token_ids,
)

pytestmark = pytest.mark.usefixtures("runner")
PROMPTS = held_out_prompts(9)
LONG = " ".join(PROMPTS[4:])  # several chunks of prefill
PARAMS = greedy(16 if USES_V2 else 32, ignore_eos=True)


def steps(llm: LLM, number: int) -> Callable[[], bool]:
    """Return a function that is true after `number` steps of the engine."""
    left = iter(range(number, 0, -1))
    return lambda: next(left) == 1


def has_drafts_for(llm: LLM, name: str) -> Callable[[], bool]:
    """Return a function that is true once the scheduler holds drafts of this request to verify."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    return lambda: any(
        request.spec_token_ids for key, request in scheduler.requests.items() if key[:2] == name
    )


STAGES: dict[str, tuple[int, str, Callable[[LLM], Callable[[], bool]]]] = {
    "waiting": (2, PROMPTS[3], lambda llm: steps(llm, 1)),
    "between two chunks of its prompt": (0, LONG, lambda llm: steps(llm, 2)),
    "decoding": (0, PROMPTS[3], lambda llm: steps(llm, 8)),
    "with drafts to be verified": (0, PROMPTS[3], lambda llm: has_drafts_for(llm, "x-")),
}
"""The victim's place in the queue, of which two are served; its prompt; when it leaves."""


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with engine() as llm:
        return token_ids(llm, PROMPTS[:4], PARAMS)


def serve(llm: LLM, place: int, victim: str, leaves: Callable[[], bool]) -> dict[str, list[int]]:
    """Serve two requests and a victim, which is aborted; then two more in its place."""
    core = llm.llm_engine
    inner = core.engine_core.engine_core
    tokens: dict[str, list[int]] = {}
    arrivals = [("0", PROMPTS[0]), ("1", PROMPTS[1])]
    arrivals.insert(place, ("x", victim))
    for name, prompt in arrivals:
        core.add_request(name, prompt, PARAMS)
    is_there = True
    while core.has_unfinished_requests():
        for output in core.step():
            if output.finished:
                tokens[output.request_id] = list(output.outputs[0].token_ids)
        if is_there and leaves():
            # With asynchronous scheduling, a step is running now.
            assert bool(inner.batch_queue) == inner.async_scheduling
            core.abort_request(["x"])
            is_there = False
            for number in (2, 3):
                core.add_request(str(number), PROMPTS[number], PARAMS)
    assert not is_there
    pool = inner.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # all but the null block
    return tokens


@pytest.mark.parametrize("scheduling", SCHEDULING)
def test_hazard_6_a_request_is_aborted_at_every_stage(
    expected: list[list[int]], scheduling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row and its blocks are reused at once. test_hazards.py has this at a fixed length."""
    fix_costs(monkeypatch)
    with engine(
        scheduling,
        speculative_config=dict(DFLASH),
        max_num_seqs=2,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=24,
        enable_prefix_caching=False,
    ) as llm:
        for stage, (place, victim, when) in STAGES.items():
            tokens = serve(llm, place, victim, when(llm))
            assert "x" not in tokens, stage
            assert [tokens[str(number)] for number in range(4)] == expected, stage
        (stats,) = llm.collective_rpc("dflash_stats")
    assert stats["nan_drafts"] == 0
    assert stats["accepted_tokens"] > 0
