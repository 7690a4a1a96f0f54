"""Tensor parallelism: one rank's text and acceptance, and every decision made once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from vllm import LLM, SamplingParams

from support.engines import DFLASH, engine, greedy, held_out_prompts, nats_behind
from support.stepped_requests import joined, tokens_by_step

POLICIES = ("fixed", "erratic", "planned")
PROMPTS = held_out_prompts(8)
TOKENS = 40
ROUNDING = 1e-3
"""Nats. Ranks only add up their parts in another order than one rank does, in float32."""
SETTINGS: dict[str, Any] = {
    "speculative_config": DFLASH,
    "worker_extension_cls": "support.watched_worker.Watched",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,  # V1 fails at a seed and a prompt in chunks
    "enable_prefix_caching": False,
}


@dataclass
class Run:
    """Results of an engine under each policy."""

    texts: dict[str, list[list[int]]] = field(default_factory=dict)
    steps: dict[str, list[list[int]]] = field(default_factory=dict)
    """How many tokens each step brought each prompt."""
    written_down: dict[str, list[Any]] = field(default_factory=dict)
    """What each rank wrote down, by policy."""
    stats: list[dict[str, Any]] = field(default_factory=list)
    """Counters of each rank, before tokens are drawn."""
    costs: list[Any] = field(default_factory=list)
    behind: dict[str, list[float]] = field(default_factory=dict)
    """How far each token of two ranks' texts is behind the best one of one rank, by policy."""


def work(llm: LLM) -> Run:
    run = Run(costs=llm.collective_rpc("profiled_costs"))
    for policy in POLICIES:
        llm.collective_rpc("draft_by", args=(policy,))
        steps = tokens_by_step(llm, PROMPTS, greedy(TOKENS, ignore_eos=True))
        run.texts[policy] = joined(steps)
        run.steps[policy] = [[len(new) for new in of_prompt] for of_prompt in steps]
        run.written_down[policy] = llm.collective_rpc("written_down")
    run.stats = llm.collective_rpc("dflash_stats")
    llm.collective_rpc("draft_by", args=("fixed",))
    # Seeded ones in a batch that fits one step.
    for prompts, seed in ((PROMPTS, None), (PROMPTS[:3], 7)):
        drawn = SamplingParams(temperature=1.0, seed=seed, max_tokens=20, ignore_eos=True)
        llm.generate(prompts, drawn, use_tqdm=False)
    run.written_down["sampled"] = llm.collective_rpc("written_down")
    return run


@pytest.fixture(scope="module")
def both() -> tuple[Run, Run]:
    """The same work on one rank and on two."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        environment.setenv("OMP_NUM_THREADS", "1")
        with engine(tensor_parallel_size=2, **SETTINGS) as llm:
            two = work(llm)
    with engine(**SETTINGS) as llm:
        one, encode = work(llm), llm.get_tokenizer().encode
        llm.collective_rpc("draft_by", args=("fixed",))
        for policy, texts in two.texts.items():
            whole = [encode(prompt) + text for prompt, text in zip(PROMPTS, texts, strict=True)]
            two.behind[policy] = nats_behind(llm, whole, TOKENS)
    return one, two


@pytest.mark.parametrize("policy", POLICIES)
def test_two_ranks_write_what_one_writes(both: tuple[Run, Run], policy: str) -> None:
    """The text is the same up to ties of float32; without a tie, the steps are the same, too."""
    one, two = both
    assert max(two.behind[policy]) < ROUNDING
    alike = [n for n, text in enumerate(two.texts[policy]) if text == one.texts["fixed"][n]]
    assert len(alike) >= len(PROMPTS) - 1
    for number in alike:
        assert two.steps[policy][number] == one.steps[policy][number]
    accepted = sum(new - 1 for text in two.steps[policy] for new in text)
    assert accepted > 2 * len(PROMPTS)  # otherwise steps would be alike whatever was drafted


def without_rates(decided: list[Any]) -> list[Any]:
    """Leave out rates: they come from confidences, which are rounded differently on one rank."""
    return [one[:-1] if isinstance(one, tuple) else one for one in decided]


@pytest.mark.parametrize("policy", [*POLICIES, "sampled"])
def test_decisions_are_made_once(both: tuple[Run, Run], policy: str) -> None:
    """Under `erratic`, each rank on its own would decide differently in every step. Each rank
    samples by itself, and what it accepts decides what it does next."""
    one, two = both
    (decided, drafted), (elsewhere, also_drafted) = two.written_down[policy]
    assert len(decided) > 5
    assert decided == elsewhere
    assert drafted == also_drafted
    if policy != "sampled":
        assert without_rates(decided) == without_rates(one.written_down[policy][0][0])


def test_ranks_start_and_count_alike(both: tuple[Run, Run]) -> None:
    """Costs are rank 0's. Counters are those of an engine of one rank."""
    one, two = both
    first, second = two.costs
    assert first == second
    assert len(first[0]) >= 2
    assert [stats["rank"] for stats in two.stats] == [0, 1]
    counters = ["steps", "drafted_steps", "skipped_steps", "probes", "draft_tokens"]
    counters += ["accepted_tokens", "draft_lengths", "nan_drafts"]
    for name in counters:
        assert [stats[name] for stats in two.stats] == [one.stats[0][name]] * 2, name
    assert one.stats[0]["nan_drafts"] == 0
