"""Random arrivals, aborts and settings on a real engine, checked after every step.

DFLASH_TRAFFIC_RUNS=20 pytest tests/test_random_traffic.py    drives that many, each of its own seed
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from engines import DFLASH, engine, fix_costs, greedy, held_out_prompts, proposer_of, token_ids
from vllm import LLM, SamplingParams

from vllm_dflash.runner.backlog import NOBODY

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


@dataclass
class Context:
    """Which slots of the drafter's cache hold a row of which token, as told by our own code."""

    proposer: Any
    stored: dict[int, int] = field(default_factory=dict)
    """Position of the row in each slot."""

    def __post_init__(self) -> None:
        context = self.proposer.model.context
        store = context.store

        def watch(features: Any, positions: Any, slots: Any) -> None:
            store(features, positions, slots)
            self.stored.update(zip(slots.tolist(), positions.tolist(), strict=True))

        context.store = watch

    def waiting(self) -> dict[int, int]:
        """Position of the row that waits for each slot."""
        backlog = self.proposer.backlog
        if backlog is None:
            return {}
        backlog._settle()
        rows = np.flatnonzero(backlog._owner != NOBODY)
        slots, positions = backlog._slots[rows].tolist(), backlog._positions[rows].tolist()
        return dict(zip(slots, positions, strict=True))

    def missing(self) -> list[tuple[str, int]]:
        """Tokens of live requests whose row is neither stored nor waits."""
        runner = self.proposer.runner
        block_size = self.proposer.block_size
        waiting = self.waiting()
        found = []
        for name in runner.input_batch.req_ids:
            request = runner.requests[name]
            (blocks,) = request.block_ids
            # The last step's rows are counted once the next one is scheduled.
            for position in range(request.num_computed_tokens):
                slot = blocks[position // block_size] * block_size + position % block_size
                if waiting.get(slot, self.stored.get(slot)) != position:
                    found.append((name, position))
        return found


def drive(llm: LLM, seed: int, context: Context, expected: dict[tuple[int, int], list[int]]) -> int:
    """Serve random requests; returns how many ended of themselves."""
    chance = random.Random(seed)
    core = llm.llm_engine
    scheduler = core.engine_core.engine_core.scheduler
    asked: dict[str, tuple[int, int]] = {}
    done = aborted = 0
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
        for output in core.step():
            if output.finished and output.outputs[0].finish_reason != "abort":
                assert list(output.outputs[0].token_ids) == expected[asked[output.request_id]]
                done += 1
        assert not context.missing()
    while core.has_unfinished_requests():
        core.step()
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # all but the null block
    return done


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
        context = Context(proposer_of(llm))
        ended = sum(drive(llm, seed, context, expected) for seed in range(RUNS))
        (stats,) = llm.collective_rpc("dflash_stats")
        (preemptions,) = (m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
    assert ended > RUNS * ARRIVALS // 2
    assert stats["draft_tokens"] >= stats["accepted_tokens"] > 0
    assert stats["nan_drafts"] == 0
    assert (preemptions > 0) == ("num_gpu_blocks_override" in changes)
