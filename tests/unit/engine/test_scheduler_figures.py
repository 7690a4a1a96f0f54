"""V2's schedulers: what they count, for `/metrics` and for vLLM."""

from typing import Any

import numpy as np
import pytest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats

from support.bare_scheduler import ahead, bare, plan_always, step
from support.fake_time import FakeTime
from support.planner_world import profiled_costs
from vllm_dflash.engine.cadence import Cadence
from vllm_dflash.engine.reporting.figures import take_figures
from vllm_dflash.engine.v2.exchange import COUNTED
from vllm_dflash.planning.planner import Planner
from vllm_dflash.planning.step import Plan


def test_drafts_are_counted_by_the_device(scheduler: Any) -> None:
    """Since the engine's start, so a count that comes again changes nothing. It comes with reports,
    and with the step without tokens that an engine becomes idle with."""
    steps = [step({"a": 3}, {"a": 3}), step({"a": 3}, {"a": 3}, reports=False), step({}, {})]
    counts = np.array([[1, 2, 1, 6], [3, 9, 4, 0]])
    for number, (scheduled, output) in enumerate(steps):
        if number != 1:
            COUNTED.attach(output, counts + number)
        scheduler.update_from_output(scheduled, output)
        found, more = scheduler.statistics, 2 * (number == 2)
        assert (found.verifications, found.free_verifications) == (4 + 2 * more, 3 + more)
        assert (found.draft_tokens, found.free_draft_tokens) == (11 + 2 * more, 9 + more)
        assert (found.accepted_tokens, found.free_accepted_tokens) == (5 + 2 * more, 4 + more)
        assert found.nan_drafts == 6 + 2 * more


def test_vllm_counts_what_was_scheduled_unless_a_report_says_more(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a report, vLLM's own method is called, and nothing of ours between."""
    seen: list[Any] = []
    monkeypatch.setattr(
        Scheduler, "make_spec_decoding_stats", lambda *given: seen.append(given[1:])
    )
    for reports in (True, False, True):
        one = step({"a": 3, "b": 3}, {"a": 2, "b": 1}, admitted={"a": 2}, reports=reports)
        scheduler.update_from_output(*one)
        scheduler.make_spec_decoding_stats("so far", 3, 1, None, "a")
        own = scheduler.make_spec_decoding_stats.__func__ is Scheduler.make_spec_decoding_stats
        assert own is not reports
    assert [drafts for _, drafts, *_ in seen] == [2, 3, 2]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    clock = FakeTime()
    for module in ("engine.v2.v2_scheduler", "engine.step_clock", "planning.step"):
        monkeypatch.setattr(f"vllm_dflash.{module}.time", clock)
    return clock


def run(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch, clock: FakeTime, *steps: Any
) -> dict[str, float]:
    """Figures that these steps of 50 ms send, and one without tokens after them."""
    sent: dict[str, float] = {}
    for scheduled, output in [*steps, step({}, {})]:
        outputs = EngineCoreOutputs(scheduler_stats=(stats := SchedulerStats()))
        monkeypatch.setattr(Scheduler, "update_from_output", lambda *_, o=outputs: {0: o})
        scheduler._update_after_schedule(scheduled)
        clock.now += 0.05
        scheduler.update_from_output(scheduled, output)
        for name, more in take_figures(stats).items():
            sent[name] = sent.get(name, 0.0) + more
    return sent


def test_figures_are_counted_here_and_sent_when_the_engine_runs_dry(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch, clock: FakeTime
) -> None:
    scheduler.planner.start(profiled_costs(), range(8))

    def plan(*_: Any, steps: int) -> Plan:
        clock.now += 0.001
        return ahead([2, 2])

    monkeypatch.setattr(Planner, "plan", plan)
    # The first has no step before it to be timed by.
    steps = [step({"a": 2, "b": 2}, {"a": a, "b": b}) for a, b in ((1, 1), (2, 1), (3, 2))]
    sent = run(scheduler, monkeypatch, clock, *steps)
    assert sent == pytest.approx(
        {
            "drafted_steps": 3,
            "drafted_requests": 6,
            "planned_tokens": 12,
            "step_seconds": 2 * 0.051,
            "planning_seconds": 3 * 0.001,
        }
    )


@pytest.mark.parametrize(
    ("runs_block", "counted"),
    [(None, (1, 0, 2, 14)), (True, (1, 0, 2, 6)), (False, (0, 1, 0, 0))],
    ids=["a fixed length", "a block", "texts alone"],
)
def test_blocks_are_counted(
    scheduler: Any,
    monkeypatch: pytest.MonkeyPatch,
    clock: FakeTime,
    runs_block: bool | None,
    counted: tuple[int, ...],
) -> None:
    """Also if the planner is never started. Steps whose drafts come from texts are skipped ones."""
    if runs_block is not None:
        plan_always(monkeypatch, 3, 3, runs_block=runs_block)
    sent = run(scheduler, monkeypatch, clock, step({"a": 7, "b": 7}, {"a": 1, "b": 8}))
    names = "drafted_steps", "skipped_steps", "drafted_requests", "planned_tokens"
    assert tuple(sent.get(name, 0) for name in names) == counted


def test_what_a_repeated_step_took_is_counted(
    monkeypatch: pytest.MonkeyPatch, clock: FakeTime
) -> None:
    scheduler = bare(monkeypatch, plans_every_step=False)
    monkeypatch.setattr(Cadence, "is_due", lambda *_: False)
    scheduler._cache.keep(["a"], np.array([3]), np.array([4]), runs_block=True)
    steps = [step({"a": 3}, {"a": 1}, reports=False) for _ in range(3)]
    sent = run(scheduler, monkeypatch, clock, *steps)
    assert sent["step_seconds"] == pytest.approx(0.1)
