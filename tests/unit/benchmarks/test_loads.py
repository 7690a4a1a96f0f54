"""Loads of `benchmarks/loads` on an engine that is only counters and a clock."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest

from loads.measures import measure_arrivals, measure_decoding, measure_swing
from loads.texts import turns_of_agents
from loads.workload import AGENT, ARRIVALS, LONGEST, MIXED, SHORT, SHORTEST, SWING, LoadsWorkload
from support.counted_engine import PROMPTS, FakeEngine
from vllm_dflash.tools.bench.bench_plan import CLOSED


def test_phases_of_a_swing() -> None:
    engine = FakeEngine()
    phases = [(2, 20), (5, 50), (1, 10)]
    result = measure_swing(engine, prompts=PROMPTS, phases=phases, tokens=100)
    assert engine.concurrency == [2] * 10 + [5] * 10 + [1] * 10
    assert result["tokens_per_second"] == [20 / 120, 50 / 150, 10 / 110]
    assert engine.aborted == ["0", "1", "2", "3", "4"]  # surplus requests, oldest first


def test_prompts_are_read_before_decoding_counts_and_batches_follow() -> None:
    engine = FakeEngine()
    result = measure_decoding(
        engine,
        prompts=PROMPTS[:3],
        concurrency=2,
        tokens=5,
        seconds=130,  # two batches take 120
        shorter=[0, 6],
        read=lambda: {"time": engine.time},
    )
    assert result["seconds"] == result["spent"]["time"] == 180
    assert result["tokens"] == 30
    first, second, third = PROMPTS[:3]
    batches = [(first, second), (third[:-6], first[:-6]), (second, third)]
    asked = [(prompt, length) for batch in batches for length in (1, 10) for prompt in batch]
    assert engine.added == asked
    assert not engine.left


def test_late_requests_do_not_delay_others() -> None:
    """Steps with one request take 11 s, with two 12 s."""
    engine = FakeEngine(tokens_per_step=2)

    def wait(seconds: float) -> None:
        engine.time += seconds

    asked: dict[str, Any] = {"answers": [3, 1, 4], "arrivals": [1.0, 5.0, 100.0]}
    result = measure_arrivals(engine, prompts=PROMPTS, **asked, wait=wait)
    # The first one at 1, alone; at 12 the second one is there, and both are done at 24.
    assert engine.concurrency == [1, 2, 1, 1]
    assert result["first_token_seconds"] == [11, 19, 11]
    assert result["seconds"] == 122


def workload(*loads: str) -> LoadsWorkload:
    return LoadsWorkload(
        loads, concurrency=(1, 4), tokens=10, seconds=2.0, phases=(1, 8), shares=(50, 90)
    )


FILES = {"code": PROMPTS[:20], "chat": PROMPTS[20:]}


def test_only_closed_loads_are_measured_with_each_file_and_temperature() -> None:
    loads = workload(MIXED, SWING, "prose")
    load = replace(loads, temperatures=(0.0, 0.7), files=(*FILES,))
    plan = load.plan_round(FILES, 0, {1: 50.0, 8: 200.0})
    mixed = ["mixed, code", "mixed, code, temperature 0.7", "mixed, chat"]
    mixed += ["mixed, chat, temperature 0.7"]
    names = [*mixed, "swing", "prose", "prose, temperature 0.7"]
    assert [*dict.fromkeys(one.load for one in plan)] == names
    hard = plan[0].arguments["prompts"][1::2]
    assert sum(prompt in PROMPTS for prompt in hard) < len(hard) / 2
    (swing,) = (one for one in plan if one.load == SWING)
    assert {*swing.arguments["prompts"]} == {*PROMPTS}
    assert swing.arguments["phases"] == [(1, 100), (8, 400)]  # each as long as a window
    assert load.seconds_of_round == 2 * (4 * 2 + 2 + 2 * 2)


def test_as_many_short_answers_as_plain_decoding_writes_in_a_window() -> None:
    load = replace(workload(SHORT, ARRIVALS), seconds=60.0)
    one, four, half, most = load.plan_round(FILES, 3, {}, {1: 14.0, 4: 56.0})
    assert [len(plan.arguments["answers"]) for plan in (one, four)] == [15, 60]
    answers = four.arguments["answers"]
    assert SHORTEST <= min(answers) <= max(answers) <= LONGEST
    assert str(half) == "arrivals, % of plain's maximum 50"
    for plan, share in ((half, 0.5), (most, 0.9)):  # of one request a second
        assert len(plan.arguments["answers"]) == pytest.approx(60 * share, rel=0.6)
    assert (load.calibrated, load.served) == ([], [1, 4])


def test_a_context_is_measured_from_several_ends_where_there_is_room() -> None:
    contexts = replace(workload(), contexts=(1024, 64))
    texts = [[*range(700)], [7], [8], [9]]
    plan = contexts.plan_contexts(texts, math.inf)
    assert str(plan[2]) == "context, 4 at a time, context 1024"
    assert [one.arguments["shorter"] for one in plan[:2]] == [[0, 32, 64, 96], [0]]
    assert plan[0].arguments["prompts"] == [[*range(700), *range(324)]]
    assert plan[3].arguments["prompts"] == [[*range(64)], [7] * 64, [8] * 64, [9] * 64]
    # 10 new tokens, as many to spare, 64 from the limit
    assert [len(contexts.plan_contexts(texts, room)) for room in (147, 148, 4 * 148)] == [0, 1, 2]
    assert workload(CLOSED).highest_concurrency == contexts.highest_concurrency == 4


def test_a_turn_of_an_agent_begins_with_all_earlier_ones() -> None:
    """So they are in the prefix cache, but not those of another round or conversation."""
    turns = turns_of_agents(2, 4, "round 1")
    for conversation in zip(*turns, strict=True):
        for earlier, later in itertools.pairwise(conversation):
            assert later.startswith(earlier)
            assert len(later) > len(earlier) + 1000
    starts = {prompt[:40] for prompt in [*turns[0], *turns_of_agents(2, 1, "round 2")[0]]}
    assert len(starts) == 4


def test_every_turn_of_an_agent_is_measured_in_order() -> None:
    plan = replace(workload(AGENT), turns=3).plan_round({}, 1)
    assert [(one.load, one.setting) for one in plan] == [
        (f"agent, {count} at a time", turn) for count in (1, 4) for turn in (1, 2, 3)
    ]
    assert [len(one.arguments["prompts"]) for one in plan] == [1, 1, 1, 4, 4, 4]
