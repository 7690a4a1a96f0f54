"""Random arrivals, aborts and settings on a real engine, checked after every step.

DFLASH_TRAFFIC_RUNS=20 pytest tests/test_random_traffic.py    drives that many, each of its own seed
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from context_rows import ContextRows
from engines import DFLASH, engine, fix_costs, greedy, held_out_prompts, token_ids
from vllm import LLM, SamplingParams

pytestmark = pytest.mark.engine
RUNS = int(os.environ.get("DFLASH_TRAFFIC_RUNS", "2"))
ARRIVALS = 24
PROMPTS = held_out_prompts(16)
SETTINGS = [
    greedy(24),
    greedy(40, ignore_eos=True),
    greedy(3),
    greedy(24, stop=["("]),
    greedy(24, repetition_penalty=1.3),
    greedy(24, logprobs=1, min_tokens=4),
]


def drive(
    llm: LLM, seed: int, context: ContextRows, expected: dict[tuple[int, int], list[int]]
) -> int:
    """Serve random requests; returns how many ended of themselves."""
    chance = random.Random(seed)
    core = llm.llm_engine
    scheduler = core.engine_core.engine_core.scheduler
    asked: dict[str, tuple[int, int]] = {}
    done = aborted = thrown_out = 0
    while done + aborted < ARRIVALS:
        if len(asked) < ARRIVALS and chance.random() < 0.4:
            choice = chance.randrange(len(PROMPTS)), chance.randrange(len(SETTINGS))
            name = f"{seed}-{len(asked)}"
            asked[name] = choice
            core.add_request(name, PROMPTS[choice[0]], SETTINGS[choice[1]])
        live = [name for name in asked if name in core.output_processor.external_req_ids]
        if live and chance.random() < 0.06:
            core.abort_request([chance.choice(live)])
            aborted += 1
        if chance.random() < 0.03:  # all that run lose their cache and resume at once
            thrown_out += len(scheduler.running)
            core.reset_prefix_cache(reset_running_requests=True)
        for output in core.step():
            if output.finished and output.outputs[0].finish_reason != "abort":
                assert list(output.outputs[0].token_ids) == expected[asked[output.request_id]]
                done += 1
        assert not context.missing()
    while core.has_unfinished_requests():
        core.step()
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # all but the null block
    return done, thrown_out


@pytest.fixture(scope="module")
def expected() -> dict[tuple[int, int], list[int]]:
    """What plain vLLM writes for every prompt and setting."""
    choices = [(p, s) for p in range(len(PROMPTS)) for s in range(len(SETTINGS))]
    with engine(max_num_seqs=16) as llm:
        params: list[SamplingParams] = [SETTINGS[s] for _, s in choices]
        tokens = token_ids(llm, [PROMPTS[p] for p, _ in choices], params)  # type: ignore[arg-type]
    return dict(zip(choices, tokens, strict=True))


@pytest.mark.parametrize(
    ("draft_length", "changes"),
    [
        # Rows of requests that end undrafted are dropped, so a cached prefix may lack them.
        ("adaptive", {"enable_prefix_caching": False}),
        ("fixed", {"num_gpu_blocks_override": 12, "max_model_len": 224}),
    ],
    ids=["planned lengths", "little cache"],
)
def test_random_traffic(
    expected: dict[tuple[int, int], list[int]],
    draft_length: str,
    changes: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Output is plain vLLM's, no block leaks, and no live request lacks a row of context."""
    fix_costs(monkeypatch)
    speculative = {**DFLASH, "draft_length": draft_length}
    with engine(
        speculative_config=speculative, max_num_seqs=6, max_num_batched_tokens=64, **changes
    ) as llm:
        context = ContextRows(llm)
        runs = [drive(llm, seed, context, expected) for seed in range(RUNS)]
        (stats,) = llm.collective_rpc("dflash_stats")
        (preemptions,) = (m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
    ended, thrown_out = map(sum, zip(*runs, strict=True))
    assert thrown_out > 0
    assert ended > RUNS * ARRIVALS // 2
    assert stats["draft_tokens"] >= stats["accepted_tokens"] > 0
    assert stats["nan_drafts"] == 0
    assert (preemptions > thrown_out) == ("num_gpu_blocks_override" in changes)
