"""Loads of `vllm-dflash bench` on an engine that is only counters and a clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from support.counted_engine import PROMPTS, FakeEngine
from vllm_dflash.tools.bench.bench_plan import CLOSED, Workload
from vllm_dflash.tools.loads import measure_answers, measure_closed
from vllm_dflash.tools.stepped_engine import Output


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


class TestAnswers:
    def test_concurrency_is_kept_until_the_last_request(self) -> None:
        engine = FakeEngine()
        result = measure_answers(engine, prompts=PROMPTS[:2], answers=[1, 3, 2], concurrency=2)
        assert engine.added == list(zip([*PROMPTS[:2], PROMPTS[0]], [1, 3, 2], strict=True))
        assert engine.concurrency == [2, 2, 2]  # the third takes the first one's place
        assert (result["tokens"], result["seconds"]) == (6, 36)
        assert result["first_token_seconds"] == [12, 12, 12]  # since it was sent
        assert result["token_seconds"] == [12, 12]  # a single token has no later ones


@dataclass
class EndsEarly(FakeEngine):
    """Answers have three tokens."""

    def add(
        self, request_id: str, prompt: str | Sequence[int], max_tokens: int, **sampling: Any
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


WORKLOAD = Workload((CLOSED,), concurrency=(1, 4), tokens=10, seconds=2.0)
FILES = {"": PROMPTS}


class TestPlan:
    def test_rounds_differ_and_are_the_same_every_time(self) -> None:
        first, again, second = (WORKLOAD.plan_round(FILES, number) for number in (0, 0, 1))
        assert first == again
        for one, other in zip(first, second, strict=True):
            assert one.arguments["prompts"] != other.arguments["prompts"]

    def test_it_is_measured_with_each_file_at_each_temperature(self) -> None:
        files = {"code": PROMPTS[:20], "chat": PROMPTS[20:]}
        load = replace(WORKLOAD, temperatures=(0.0, 0.7), files=(*files,))
        plan = load.plan_round(files, 0)
        assert [*dict.fromkeys(one.load for one in plan)] == [
            "closed, code",
            "closed, code, temperature 0.7",
            "closed, chat",
            "closed, chat, temperature 0.7",
        ]
        _, _, code, _, chat, *_ = plan
        assert {*code.arguments["prompts"]} == {*PROMPTS[:20]}
        assert code.arguments["sampling"] == {"temperature": 0.7, "ignore_eos": False}
        assert {*chat.arguments["prompts"]} == {*PROMPTS[20:]}
        assert load.seconds_of_round == 2 * len(plan)
