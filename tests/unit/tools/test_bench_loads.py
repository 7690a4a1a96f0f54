"""Loads of `vllm-dflash bench` on an engine that is only counters and a clock."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from vllm_dflash.tools.bench.bench_plan import (
    ARRIVALS,
    CLOSED,
    LONGEST,
    MIXED,
    SHORT,
    SHORTEST,
    SWING,
    Workload,
    plan_contexts,
    plan_round,
)
from vllm_dflash.tools.bench.bench_prompts import easy_and_hard, long_texts
from vllm_dflash.tools.loads import (
    measure_answers,
    measure_closed,
    measure_decoding,
    measure_swing,
)
from vllm_dflash.tools.stepped_engine import Output, SteppedEngine

PROMPTS = [f"prompt {number} has words" for number in range(50)]


@dataclass
class FakeEngine(SteppedEngine):
    """Each step takes 10 seconds plus one per request in flight, and gives each request
    `tokens_per_step` tokens."""

    tokens_per_step: int = 1
    time: float = 100.0
    left: dict[str, int] = field(default_factory=dict)
    added: list[tuple[str, int]] = field(default_factory=list)
    concurrency: list[int] = field(default_factory=list)
    """Requests in flight during each step."""
    aborted: list[str] = field(default_factory=list)
    emitted: list[tuple[float, int]] = field(default_factory=list)

    def add(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        max_tokens: int,
        *,
        whole: bool = False,
        **sampling: Any,
    ) -> None:
        assert request_id not in self.left
        assert isinstance(prompt, str)
        assert max_tokens > 0
        assert (whole, sampling) == (False, {"ignore_eos": True})  # as long as asked for
        self.left[request_id] = max_tokens
        self.added.append((prompt, max_tokens))

    def step(self) -> list[Output]:
        assert self.left, "a step of an idle engine would never end"
        self.concurrency.append(len(self.left))
        self.time += 10 + len(self.left)
        outputs = []
        for request_id, left in list(self.left.items()):
            new = min(left, self.tokens_per_step)
            self.left[request_id] -= new
            outputs.append(Output(request_id, [7] * new, new == left))
            if new == left:
                del self.left[request_id]
        self.emitted.append((self.time, sum(len(output.token_ids) for output in outputs)))
        return outputs

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            del self.left[request_id]
        self.aborted += request_ids

    def now(self) -> float:
        return self.time

    def wait_until(self, moment: float) -> None:
        self.time = max(self.time, moment)


@dataclass
class SlowToStart(FakeEngine):
    """The first requests' prompts are slow: one request per step gets its first token."""

    def step(self) -> list[Output]:
        steps = len(self.concurrency) + 1
        waiting = {name: self.left.pop(name) for name in list(self.left)[steps:]}
        outputs = super().step()
        self.left |= waiting
        return outputs


class TestClosed:
    @pytest.mark.parametrize("concurrency", [1, 7, 32])
    @pytest.mark.parametrize("tokens_per_step", [1, 5])
    def test_concurrency_is_exact_in_every_step(
        self, concurrency: int, tokens_per_step: int
    ) -> None:
        engine = FakeEngine(tokens_per_step)
        measure_closed(engine, prompts=PROMPTS, concurrency=concurrency, tokens=24, seconds=5_000)
        assert set(engine.concurrency) == {concurrency}
        assert len(engine.concurrency) > 100

    def test_requests_come_in_the_order_of_the_prompts_over_and_over(self) -> None:
        engine = FakeEngine()
        measure_closed(engine, prompts=PROMPTS, concurrency=3, tokens=2, seconds=2_000)
        prompts = [prompt for prompt, _ in engine.added]
        assert len(prompts) > len(PROMPTS)
        assert prompts == (PROMPTS * 20)[: len(prompts)]

    def test_first_requests_are_staggered_so_that_few_finish_at_once(self) -> None:
        engine = FakeEngine()
        measure_closed(engine, prompts=PROMPTS, concurrency=4, tokens=20, seconds=5_000)
        lengths = [length for _, length in engine.added]
        assert lengths[:4] == [5, 10, 15, 20]
        assert set(lengths[4:]) == {20}

    def test_more_requests_than_tokens(self) -> None:
        engine = FakeEngine()
        measure_closed(engine, prompts=PROMPTS, concurrency=32, tokens=4, seconds=500)
        assert Counter(length for _, length in engine.added[:32]) == {1: 8, 2: 8, 3: 8, 4: 8}

    def test_counts_whole_steps_of_the_window_only(self) -> None:
        engine = FakeEngine()
        result = measure_closed(engine, prompts=PROMPTS, concurrency=2, tokens=8, seconds=100)
        # The first step is the ramp; steps take 12 seconds, so 9 of them fill the window.
        assert result["seconds"] == 108
        assert result["tokens"] == 18
        assert result["tokens_per_second"] == pytest.approx(18 / 108)
        assert len(engine.concurrency) == 10

    def test_window_opens_when_each_of_the_first_requests_has_a_token(self) -> None:
        engine = SlowToStart()
        result = measure_closed(engine, prompts=PROMPTS, concurrency=4, tokens=40, seconds=14)
        assert result["tokens"] == 4
        assert [tokens for _, tokens in engine.emitted] == [1, 2, 3, 4, 4]

    def test_nothing_is_left_in_flight(self) -> None:
        engine = FakeEngine()
        measure_closed(engine, prompts=PROMPTS, concurrency=5, tokens=8, seconds=100)
        assert not engine.left
        assert len(engine.aborted) == 5

    def test_tokens_per_output_is_what_a_step_gives_a_request(self) -> None:
        engine = FakeEngine(tokens_per_step=3)
        result = measure_closed(engine, prompts=PROMPTS, concurrency=2, tokens=300, seconds=200)
        assert result["tokens_per_output"] == 3


class TestSwing:
    def test_phases_have_their_concurrency_and_work(self) -> None:
        engine = FakeEngine()
        phases = [(2, 20), (5, 50), (1, 10)]
        measure_swing(engine, prompts=PROMPTS, phases=phases, tokens=100)
        assert engine.concurrency == [2] * 10 + [5] * 10 + [1] * 10
        assert not engine.left

    def test_surplus_requests_hang_up_oldest_first(self) -> None:
        engine = FakeEngine()
        measure_swing(engine, prompts=PROMPTS, phases=[(3, 3), (1, 1)], tokens=100)
        assert engine.aborted == ["0", "1", "2"]
        assert len(engine.added) == 3

    def test_requests_admitted_at_a_change_are_staggered(self) -> None:
        engine = FakeEngine()
        measure_swing(engine, prompts=PROMPTS, phases=[(1, 1), (5, 5)], tokens=100)
        assert [length for _, length in engine.added] == [100, 25, 50, 75, 100]

    def test_tokens_per_second_of_each_phase(self) -> None:
        engine = FakeEngine()
        result = measure_swing(engine, prompts=PROMPTS, phases=[(2, 20), (5, 50)], tokens=100)
        assert result["concurrency"] == [2, 5]
        assert result["tokens_per_second"] == [20 / 120, 50 / 150]

    def test_a_phase_is_of_whole_steps(self) -> None:
        # 4 requests emit 20 tokens in each step of 14 s: 30 take 2 steps, which emit 40.
        engine = FakeEngine(tokens_per_step=5)
        result = measure_swing(engine, prompts=PROMPTS, phases=[(4, 30), (1, 5)], tokens=100)
        assert result["tokens_per_second"] == pytest.approx([40 / 28, 5 / 11])


@dataclass
class RoomForTwo(FakeEngine):
    """Two requests run; others wait until one of them is done."""

    def step(self) -> list[Output]:
        waiting = {name: self.left.pop(name) for name in list(self.left)[2:]}
        outputs = super().step()
        self.left |= waiting
        return outputs


class TestDecoding:
    @pytest.mark.parametrize("kind", [FakeEngine, SlowToStart])
    @pytest.mark.parametrize("tokens_per_step", [1, 4])
    def test_all_run_together_while_it_counts(
        self, kind: type[FakeEngine], tokens_per_step: int
    ) -> None:
        engine = kind(tokens_per_step)
        steps: list[int] = []

        def read() -> dict[str, float]:
            steps.append(len(engine.concurrency))
            return {"time": engine.time}

        result = measure_decoding(
            engine, prompts=PROMPTS, concurrency=3, tokens=8, seconds=1, read=read
        )
        opened, closed = steps
        assert engine.concurrency[opened:closed] == [3] * (8 // tokens_per_step)
        assert result["tokens"] == 3 * 8
        assert result["seconds"] == result["spent"]["time"] == 13 * 8 / tokens_per_step
        assert result["tokens_per_second"] == result["tokens"] / result["seconds"]
        assert result["tokens_per_output"] == tokens_per_step
        assert not engine.left

    def test_prompts_are_read_first(self) -> None:
        engine = FakeEngine()
        measure_decoding(engine, prompts=PROMPTS, concurrency=2, tokens=8, seconds=1)
        assert engine.added == [(prompt, length) for length in (1, 16) for prompt in PROMPTS[:2]]
        assert engine.emitted[0] == (112, 2)

    def test_batches_follow_until_the_time_is_over(self) -> None:
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
        words = [prompt for prompt, length in engine.added if length > 1]
        first, second, third = PROMPTS[:3]
        assert words == [first, second, third[:-6], first[:-6], second, third]

    def test_one_that_is_done_early_ends_its_batch(self) -> None:
        engine = FakeEngine(tokens_per_step=1)
        step = engine.step

        def uneven() -> list[Output]:
            """The first request gets only its first token, so on average it takes long."""
            stays = engine.left.get("0-0", 0)
            outputs = step()
            if 0 < stays < 10:
                engine.left["0-0"] = stays
                outputs = outputs[1:]
            return outputs

        engine.step = uneven
        result = measure_decoding(engine, prompts=PROMPTS, concurrency=2, tokens=5, seconds=1)
        assert result["tokens"] == 9
        assert not engine.left

    def test_no_room_for_all(self) -> None:
        with pytest.raises(ValueError, match="before the last of 3 started: the engine has no"):
            measure_decoding(RoomForTwo(), prompts=PROMPTS, concurrency=3, tokens=4, seconds=1)


class TestAnswers:
    def test_so_many_are_in_flight_and_each_is_replaced(self) -> None:
        engine = FakeEngine()
        result = measure_answers(engine, prompts=PROMPTS[:2], answers=[1, 3, 2], concurrency=2)
        assert engine.added == list(zip([*PROMPTS[:2], PROMPTS[0]], [1, 3, 2], strict=True))
        assert engine.concurrency == [2, 2, 2]  # the third takes the first one's place
        assert (result["tokens"], result["seconds"]) == (6, 36)
        assert result["first_token_seconds"] == [12, 12, 12]  # since it was sent
        assert result["token_seconds"] == [12, 12]  # a single token has no later ones

    def test_who_comes_late_is_waited_for_and_nobody_is_held_up(self) -> None:
        """Steps with one request take 11 s, with two 12 s."""
        engine = FakeEngine(tokens_per_step=2)
        read = lambda: {"time": engine.time, "steps": float(len(engine.concurrency))}  # noqa: E731
        result = measure_answers(
            engine, prompts=PROMPTS, answers=[3, 1, 4], arrivals=[1.0, 5.0, 100.0], read=read
        )
        # The first one at 1, alone; at 12 the second one is there, and both are done at 24.
        assert engine.concurrency == [1, 2, 1, 1]
        assert result["first_token_seconds"] == [11, 19, 11]
        assert result["token_seconds"] == [pytest.approx(12 / 2), pytest.approx(11 / 3)]
        assert result["seconds"] == 122
        assert result["spent"] == {"time": 122, "steps": 4}


@dataclass
class EndsEarly(FakeEngine):
    """Answers have three tokens."""

    def add(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        max_tokens: int,
        *,
        whole: bool = False,
        **sampling: Any,
    ) -> None:
        assert sampling == {"temperature": 0.5}
        super().add(request_id, prompt, min(max_tokens, 3), ignore_eos=True)


def test_what_each_request_of_a_set_saw() -> None:
    engine = EndsEarly(tokens_per_step=2)
    asked: dict[str, Any] = {"prompts": PROMPTS, "answers": [9, 1, 9], "concurrency": 2}
    sampling = {"temperature": 0.5}
    result = measure_answers(engine, **asked, categories=["a", "b", "a"], sampling=sampling)
    assert result["requests"] == [
        {"category": "a", "seconds": [12, 24], "tokens": [2, 1]},
        {"category": "b", "seconds": [12], "tokens": [1]},
        {"category": "a", "seconds": [12, 23], "tokens": [2, 1]},
    ]
    assert (result["tokens"], result["seconds"]) == (7, 35)  # tokens written, not the maximum
    assert result["token_seconds"] == [6, 5.5]


def test_requests_are_recorded_where_they_have_categories() -> None:
    result = measure_answers(FakeEngine(), prompts=PROMPTS, answers=[2])
    assert "requests" not in result


def workload(*loads: str) -> Workload:
    return Workload(
        loads, concurrency=(1, 4), phases=(1, 8), tokens=10, seconds=2.0, shares=(50, 90)
    )


RATES = {1: 50.0, 8: 200.0}
FILES = {"": PROMPTS}


class TestPlan:
    def test_rounds_differ_and_are_the_same_every_time(self) -> None:
        load = workload(CLOSED, SWING)
        first, again, second = (plan_round(load, FILES, number, RATES) for number in (0, 0, 1))
        assert first == again
        for one, other in zip(first, second, strict=True):
            assert one.arguments["prompts"] != other.arguments["prompts"]

    def test_closed_measures_each_concurrency(self) -> None:
        plan = plan_round(workload(CLOSED), FILES, 0, {})
        assert [one.setting for one in plan] == [1, 4]
        assert [one.arguments["concurrency"] for one in plan] == [1, 4]
        assert sorted(plan[0].arguments["prompts"]) == sorted(PROMPTS)

    def test_every_other_prompt_of_mixed_is_hard(self) -> None:
        plan = plan_round(workload(MIXED), FILES, 0, {})
        prompts = plan[0].arguments["prompts"]
        assert all(prompt in PROMPTS for prompt in prompts[::2])
        words = [sorted(prompt.split()) for prompt in PROMPTS]
        assert all(sorted(prompt.split()) in words for prompt in prompts[1::2])
        assert sum(prompt in PROMPTS for prompt in prompts[1::2]) < len(prompts) / 4

    def test_closed_loads_are_measured_with_each_file_at_each_temperature(self) -> None:
        files = {"code": PROMPTS[:20], "chat": PROMPTS[20:]}
        load = replace(workload(CLOSED, SWING, "prose"), temperatures=(0.0, 0.7), files=(*files,))
        plan = plan_round(load, files, 0, RATES)
        assert [*dict.fromkeys(one.load for one in plan)] == [
            "closed, code",
            "closed, code, temperature 0.7",
            "closed, chat",
            "closed, chat, temperature 0.7",
            "swing",
            "prose",
            "prose, temperature 0.7",
        ]
        _, _, code, _, chat, *_ = plan
        assert {*code.arguments["prompts"]} == {*PROMPTS[:20]}
        assert code.arguments["sampling"] == {"temperature": 0.7, "ignore_eos": False}
        assert {*chat.arguments["prompts"]} == {*PROMPTS[20:]}
        (swing,) = (one for one in plan if one.load == SWING)
        assert {*swing.arguments["prompts"]} == {*PROMPTS}
        assert load.seconds_of_round == 2 * (4 * 2 + 2 + 2 * 2)

    def test_hard_prompts_stay_the_same(self) -> None:
        assert easy_and_hard(PROMPTS) == easy_and_hard(PROMPTS)

    def test_phases_of_swing_take_plain_decoding_as_long_as_a_window(self) -> None:
        (swing,) = plan_round(workload(SWING), FILES, 0, RATES)
        assert swing.arguments["phases"] == [(1, 100), (8, 400)]

    def test_short_answers_are_as_many_as_plain_decoding_writes_in_a_window(self) -> None:
        load = replace(workload(SHORT), seconds=60.0)
        one, four = plan_round(load, FILES, 3, {}, {1: 14.0, 4: 56.0})
        assert (one.setting, four.setting) == (1, 4)
        assert [len(plan.arguments["answers"]) for plan in (one, four)] == [15, 60]
        answers = four.arguments["answers"]
        assert min(answers) >= SHORTEST
        assert max(answers) <= LONGEST
        assert statistics.mean(answers) == pytest.approx(56, rel=0.15)
        assert answers[:15] == one.arguments["answers"]  # of the same round
        again, _ = plan_round(load, FILES, 4, {}, {1: 14.0, 4: 56.0})
        assert again.arguments["answers"] != one.arguments["answers"]
        (few, _) = plan_round(load, FILES, 3, {}, {1: 0.1, 4: 0.1})
        assert len(few.arguments["answers"]) == 2

    def test_arrivals_are_so_many_percent_of_what_plain_decoding_serves(self) -> None:
        load = replace(workload(ARRIVALS), seconds=1000.0)
        half, most = plan_round(load, FILES, 0, {}, {4: 56.0})  # one request a second
        assert (half.setting, most.setting) == (50, 90)
        for plan, share in ((half, 0.5), (most, 0.9)):
            arrivals = plan.arguments["arrivals"]
            assert arrivals == sorted(arrivals)
            assert len(arrivals) == len(plan.arguments["answers"])
            gaps = [b - a for a, b in itertools.pairwise(arrivals)]
            assert statistics.mean(gaps) == pytest.approx(1 / share, rel=0.1)
            # In a Poisson process, the gaps' standard deviation equals their mean.
            assert statistics.stdev(gaps) == pytest.approx(1 / share, rel=0.15)

    def test_calibrates_only_what_is_needed(self) -> None:
        assert workload(CLOSED, MIXED).calibrated == []
        assert [workload(one).served for one in (CLOSED, SHORT, ARRIVALS)] == [[], [1, 4], [4]]
        assert workload(SWING).calibrated == [1, 8]
        assert workload(SWING).highest_concurrency == 8
        assert workload(CLOSED).highest_concurrency == 4
        for where in (False, True):
            wide = replace(workload(SWING), concurrency=(64,), where=where)
            assert wide.highest_concurrency == (64 if where else 8)

    def test_a_context_is_measured_from_several_ends(self) -> None:
        contexts = replace(workload(), contexts=(1024, 64))
        plan = plan_contexts(contexts, [list(range(700)), [7], [8], [9]], math.inf)
        assert [(one.load, one.setting) for one in plan] == [
            ("context, 1 at a time", 1024),
            ("context, 1 at a time", 64),
            ("context, 4 at a time", 1024),
            ("context, 4 at a time", 64),
        ]
        assert str(plan[2]) == "context, 4 at a time, context 1024"
        assert [one.arguments["shorter"] for one in plan[:2]] == [[0, 32, 64, 96], [0]]
        assert plan[0].arguments["prompts"] == [[*range(700), *range(324)]]
        assert plan[3].arguments["prompts"] == [list(range(64)), [7] * 64, [8] * 64, [9] * 64]

    def test_a_context_needs_room_for_what_follows_it(self) -> None:
        contexts = replace(workload(), contexts=(100,))
        texts = [[7]] * 4
        for count in (1, 4):  # 10 new tokens, as many to spare, 64 from the limit
            assert len(plan_contexts(contexts, texts, count * 184)) == (1 if count == 1 else 2)
            assert len(plan_contexts(contexts, texts, count * 184 - 1)) == (0 if count == 1 else 1)
        assert contexts.highest_concurrency == 4

    def test_long_texts_begin_at_prompts_far_from_each_other(self) -> None:
        texts = long_texts(PROMPTS[:5], 2)
        assert texts == ["\n".join(PROMPTS[:5]), "\n".join([*PROMPTS[2:5], *PROMPTS[:2]])]
        assert len({*long_texts(PROMPTS, 50)}) == 50
