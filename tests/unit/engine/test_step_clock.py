"""Step times, the start-up profile and the line in the log, on a clock of the tests' own."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_dflash.engine import clock as clock_module
from vllm_dflash.engine import profile as profiling
from vllm_dflash.engine.clock import StepClock
from vllm_dflash.engine.periodic_log import PeriodicLog
from vllm_dflash.engine.profile import measure_curve, profiled_rows
from vllm_dflash.engine.statistics import DraftStatistics
from vllm_dflash.planning.costs import StepEstimate, StepTimes
from vllm_dflash.planning.planner import Plan


class FakeTime:
    """`time`, as the modules under test see it."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    time = FakeTime()
    monkeypatch.setattr(clock_module, "time", time)
    monkeypatch.setattr(profiling, "time", time)
    return time


def step(clock: StepClock, fake: FakeTime, ids: list[str], seconds: float, **ends: Any) -> Any:
    clock.begin(ids, len(ids), only_decodes=True)
    fake.now += seconds
    return clock.end(more_alike=ends.get("more_alike", False))


def test_the_first_step_after_idling_is_not_timed(fake: FakeTime) -> None:
    clock = StepClock()
    assert step(clock, fake, ["a"], 1.0) == (0.0, None)
    wall, times = step(clock, fake, ["a", "b"], 2.0)
    assert wall == pytest.approx(2.0)
    assert times is not None
    assert (times.num_requests, times.step_seconds) == (2, pytest.approx(2.0))
    fake.now += 60  # nothing to do
    assert step(clock, fake, ["c"], 1.0) == (0.0, None)


def test_draft_and_context_are_taken_out_of_the_step(fake: FakeTime) -> None:
    clock = StepClock()
    step(clock, fake, ["a"], 1.0)
    clock.begin(["a"], 3, only_decodes=True)
    fake.now += 2.0
    with clock.timing("draft"):
        fake.now += 0.5
    with clock.timing("context"):
        fake.now += 0.25
    clock.draft_rows, clock.context_rows = 8, 3
    wall, times = clock.end(more_alike=False)
    assert wall == pytest.approx(2.75)
    assert times == StepTimes(1, 3, pytest.approx(2.0), 8, 0.5, 3, 0.25)
    _, times = step(clock, fake, ["a"], 1.0)
    assert (times.draft_rows, times.draft_seconds, times.context_seconds) == (0, 0, 0)


def test_steps_with_prompts_teach_nothing(fake: FakeTime) -> None:
    clock = StepClock()
    step(clock, fake, ["a"], 1.0)
    clock.begin(["a", "b"], 40, only_decodes=False)
    fake.now += 3.0
    assert clock.end(more_alike=False) == (pytest.approx(3.0), None)


def test_alike_steps_are_reported_together(fake: FakeTime) -> None:
    clock = StepClock()
    step(clock, fake, ["a"], 1.0)
    assert step(clock, fake, ["a"], 1.0, more_alike=True)[1] is None
    assert step(clock, fake, ["a"], 2.0, more_alike=True)[1] is None
    times = step(clock, fake, ["a"], 3.0)[1]
    assert (times.step_seconds, times.num_steps) == (pytest.approx(2.0), 3)
    assert step(clock, fake, ["a"], 5.0, more_alike=True)[1] is None
    times = step(clock, fake, ["a", "b"], 7.0)[1]  # another batch: the step before is dropped
    assert (times.step_seconds, times.num_steps) == (pytest.approx(7.0), 1)


def test_a_profile_stops_when_its_time_is_up(fake: FakeTime) -> None:
    runs: list[int] = []

    def run(count: int) -> None:
        runs.append(count)
        fake.now += 0.01 * count

    curve = measure_curve(run, (1, 2, 4, 8, 16), lambda seconds: seconds, budget=0.15)
    assert sorted(set(runs)) == [1, 2, 4]  # 3 * (0.01 + 0.02 + 0.04) > 0.15
    assert float(curve.at(3)) == pytest.approx(0.03)
    assert float(curve.at(16)) == pytest.approx(0.16)  # goes on with the last slope


def test_profiled_batches_are_never_longer_than_their_requests_may_be() -> None:
    """A batch that is neither of single rows nor evenly filled would read beyond its cache."""
    for max_requests, most in ((64, 512), (100, 1600), (1, 8), (256, 300)):
        rows = profiled_rows(max_requests, most)
        assert all(count <= max_requests or count % max_requests == 0 for count in rows)
        assert rows == sorted(set(rows))
        assert rows[-1] <= most
        assert len(rows) >= 2


def statistics_of_a_step() -> DraftStatistics:
    statistics = DraftStatistics(3)
    plan = Plan(np.array([True]), width=3, price=1.0, speedup=1.5)
    statistics.observe_plan(plan, possible=True)
    statistics.observe_lengths(np.array([2, 0, 2]))
    statistics.observe_verification(np.array([2, 2]), np.array([3, 1]))
    statistics.observe_step(
        StepTimes(2, 6, 0.04, 8, 0.01, 0, 0.0), StepEstimate(0.03, 0.012, 0.0, 0.025), produced=4
    )
    return statistics


def test_statistics_compare_what_was_expected_with_what_came() -> None:
    statistics = statistics_of_a_step()
    statistics.observe_plan(Plan(np.array([False]), 0, 1.0, 1.0), possible=True)
    statistics.observe_plan(Plan(np.array([False]), 0, 1.0, 1.0), possible=False)
    counted = statistics.to_dict()
    assert (counted["steps"], counted["drafted_steps"], counted["skipped_steps"]) == (3, 1, 1)
    assert counted["draft_lengths"] == [1, 0, 2, 0]
    assert counted["costs_ms"]["step"] == {"estimated": 30.0, "measured": 40.0}
    assert counted["costs_ms"]["draft"] == {"estimated": 12.0, "measured": 10.0}
    # In 50 ms, plain decoding makes 2 tokens of 25 ms each twice.
    assert counted["measured_speedup"] == pytest.approx(4 / 4)
    assert counted["predicted_speedup"] == pytest.approx(1.5)


def test_the_log_line_comes_every_so_often_and_covers_what_is_new() -> None:
    lines: list[str] = []
    now = SimpleNamespace(seconds=0.0)
    statistics = DraftStatistics(3)
    log = PeriodicLog(
        statistics, 10.0, lambda text, *values: lines.append(text % values), lambda: now.seconds
    )
    log.tick()
    now.seconds = 11.0
    log.tick()
    assert not lines  # nothing happened
    fresh = statistics_of_a_step()
    vars(statistics).update(vars(fresh))
    now.seconds = 15.0
    log.tick()
    assert not lines
    now.seconds = 22.0
    log.tick()
    assert lines == [
        "DFlash planner: Drafted steps: 100%, Mean draft length: 2.00, Mean acceptance length:"
        " 2.00, Step: 40.0 ms (estimated 30.0 ms), Speed against plain decoding, by the cost"
        " model: 1.00x (predicted 1.50x)"
    ]
    now.seconds = 40.0
    log.tick()
    assert len(lines) == 1
