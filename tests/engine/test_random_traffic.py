"""Random arrivals, hang-ups, resets and settings in any order on a real engine (hypothesis)."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)
from vllm import LLM, RequestOutput, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from support.context_rows import ContextRows
from support.engines import (
    DFLASH,
    USES_V2,
    engine,
    fix_costs,
    greedy,
    held_out_prompts,
)

pytestmark = pytest.mark.usefixtures("runner")
# Less of everything in Triton's interpreter.
PROMPTS = held_out_prompts(4 if USES_V2 else 10)
TOKENS, MANY = (8, 24) if USES_V2 else (24, 40)
SETTINGS = [
    greedy(TOKENS),
    greedy(MANY, ignore_eos=True),
    greedy(3),
    greedy(TOKENS, stop=["("], bad_words=["self"]),
    greedy(TOKENS, stop_token_ids=list(range(9, 60)), min_tokens=5),
    greedy(TOKENS, repetition_penalty=1.3, logprobs=1),
    greedy(TOKENS, structured_outputs=StructuredOutputsParams(regex=r"def [a-z_]{3,12}\(self\):")),
]
if not USES_V2:  # the interpreter cannot run V2's kernel for top-k
    # vLLM refuses n > 1 at temperature 0.
    SETTINGS.append(SamplingParams(n=2, top_k=1, max_tokens=16))
PROMPT, SETTING = st.integers(0, len(PROMPTS) - 1), st.integers(0, len(SETTINGS) - 1)
Tokens = list[list[int]]


def tokens_of(output: RequestOutput) -> Tokens:
    return [list(one.token_ids) for one in output.outputs]


class Traffic(RuleBasedStateMachine):
    """One engine for all runs, so that each run finds what earlier ones left behind."""

    llm: ClassVar[LLM]
    context: ClassVar[ContextRows]
    expected: ClassVar[dict[tuple[int, int], Tokens]]
    seen: ClassVar[Counter[str]]
    numbers: ClassVar[itertools.count[int]]

    def __init__(self) -> None:
        super().__init__()
        self.core = self.llm.llm_engine
        self.scheduler = self.core.engine_core.engine_core.scheduler
        self.live: dict[str, tuple[int, int]] = {}

    @rule(prompt=PROMPT, setting=SETTING)
    def somebody_asks(self, prompt: int, setting: int) -> None:
        name = str(next(self.numbers))
        self.live[name] = prompt, setting
        self.core.add_request(name, PROMPTS[prompt], SETTINGS[setting])

    # No preconditions: the engine chooses which requests run, and draws must not depend on that.
    @rule(choice=st.integers(0, 99))
    def somebody_hangs_up(self, choice: int) -> None:
        if not self.live:
            return
        name = sorted(self.live)[choice % len(self.live)]
        self.core.abort_request([name])
        del self.live[name]
        self.seen["hung up"] += 1

    @rule()
    def all_lose_their_cache(self) -> None:
        if len(self.scheduler.running) < 2:
            return
        self.seen["thrown out"] += len(self.scheduler.running)
        assert self.core.reset_prefix_cache(reset_running_requests=True)

    @rule(count=st.integers(1, 12))
    def time_passes(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def step(self) -> None:
        for output in self.core.step():
            if output.finished and output.request_id in self.live:
                assert tokens_of(output) == self.expected[self.live.pop(output.request_id)]
                self.seen["served"] += 1
        assert not self.context.missing()

    @invariant()
    def nobody_is_lost(self) -> None:
        assert set(self.live) <= set(self.core.output_processor.external_req_ids)

    def teardown(self) -> None:
        """Serve the remaining requests; check that nothing of them stays."""
        try:
            while self.core.has_unfinished_requests():
                self.step()
            assert not self.live
            pool = self.scheduler.kv_cache_manager.block_pool
            assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # all but the null block
        finally:
            self.core.abort_request(list(self.core.output_processor.external_req_ids))


@pytest.fixture(scope="module")
def expected() -> dict[tuple[int, int], Tokens]:
    """Tokens that plain vLLM writes for every prompt and setting."""
    choices = [(p, s) for p in range(len(PROMPTS)) for s in range(len(SETTINGS))]
    with engine(max_num_seqs=32) as llm:
        asked = [PROMPTS[p] for p, _ in choices], [SETTINGS[s] for _, s in choices]
        outputs = llm.generate(*asked, use_tqdm=False)
        return dict(zip(choices, map(tokens_of, outputs), strict=True))


LITTLE = {"num_gpu_blocks_override": 12, "max_model_len": 224}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "planned lengths": ("adaptive", "synchronous", {"enable_prefix_caching": False}),
    "planned lengths, little cache": ("adaptive", "synchronous", LITTLE),
    "little cache": ("fixed", "synchronous", LITTLE),
}
SLOW = ["planned lengths"]
if USES_V2:  # it takes minutes for each, and more can go wrong with asynchronous scheduling
    SLOW = ["planned lengths, little cache"]
    LITTLE = {"num_gpu_blocks_override": 8, "max_model_len": 128}
    CASES = {
        "planned lengths, little cache": ("adaptive", "synchronous", LITTLE),
        "asynchronous, planned lengths, little cache": ("adaptive", "asynchronous", LITTLE),
    }


def random_traffic(seed: int, events: int) -> None:
    """Run random events as hypothesis would; its first examples have one or two rules each."""
    draw = random.Random(seed)
    traffic = Traffic()
    try:
        for _ in range(events):
            kind = draw.random()
            if kind < 0.4:
                traffic.somebody_asks(
                    prompt=draw.randrange(len(PROMPTS)), setting=draw.randrange(len(SETTINGS))
                )
            elif kind < 0.55:
                traffic.somebody_hangs_up(choice=draw.randrange(100))
            elif kind < 0.75:
                traffic.all_lose_their_cache()
            else:
                traffic.time_passes(count=draw.randint(1, 6))
            traffic.nobody_is_lost()
    finally:
        traffic.teardown()


@pytest.mark.hypothesis
@pytest.mark.parametrize(
    ("draft_length", "scheduling", "changes"),
    [
        pytest.param(
            *case,
            id=name,
            marks=pytest.mark.slow if name in SLOW else [],
        )
        for name, case in CASES.items()
    ],
)
def test_random_traffic(
    expected: dict[tuple[int, int], Tokens],
    draft_length: str,
    scheduling: str,
    changes: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plain tokens, whole contexts, no block lost, whatever the order of events."""
    fix_costs(monkeypatch)
    speculative = {**DFLASH, "draft_length": draft_length}
    with engine(
        scheduling,
        speculative_config=speculative,
        max_num_seqs=6,
        max_num_batched_tokens=64,
        **changes,
    ) as llm:
        Traffic.llm, Traffic.context, Traffic.expected = llm, ContextRows(llm), expected
        Traffic.seen, Traffic.numbers = Counter(), itertools.count()
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        preempt = scheduler._preempt_request

        def counted(*args: Any, **named: Any) -> None:
            Traffic.seen["preempted"] += 1
            preempt(*args, **named)

        monkeypatch.setattr(scheduler, "_preempt_request", counted)
        # Requests that repeat themselves end soon: hypothesis seldom draws events that need
        # several of them.
        for seed in (2, 4, 5):
            random_traffic(seed, events=60)
        if not USES_V2:
            run_state_machine_as_test(
                Traffic,
                settings=settings(
                    max_examples=settings().max_examples // 8,
                    stateful_step_count=40,
                    suppress_health_check=list(HealthCheck),
                ),
            )
        (stats,) = llm.collective_rpc("dflash_stats")
    assert min(Traffic.seen[event] for event in ("served", "hung up", "thrown out")) > 5
    assert stats["draft_tokens"] >= stats["accepted_tokens"] > 0
    assert stats["nan_drafts"] == 0
    preempted = Traffic.seen["preempted"] - Traffic.seen["thrown out"]  # too few blocks
    assert (preempted > 0) == ("num_gpu_blocks_override" in changes)
