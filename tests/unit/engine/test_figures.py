"""Figures for `/metrics`: what is counted, how it travels, and what arrives."""

import re
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, generate_latest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from support.pairs import Pair
from vllm_dflash.engine.reporting.figures import (
    FIGURES_SENT,
    INTERVAL,
    CountingScheduler,
    send_figures,
    take_figures,
)
from vllm_dflash.engine.reporting.prometheus import FigureLogger
from vllm_dflash.engine.reporting.statistics import METRICS, DraftStatistics, Figures, Increases
from vllm_dflash.engine.v1.v1_scheduler import V1Scheduler
from vllm_dflash.engine.v1.v1_worker import V1CPUWorker
from vllm_dflash.engine.worker import DraftingWorker


def test_a_worker_sends_the_rest_with_the_output_without_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DraftingWorker, "execute_model", lambda *_: EMPTY_MODEL_RUNNER_OUTPUT)
    worker: Any = object.__new__(V1CPUWorker)
    statistics = DraftStatistics(3)
    statistics.drafted_steps = 1
    worker._figures, worker.draft_groups = Increases(statistics, INTERVAL, METRICS), []
    sent = worker.execute_model(SimpleNamespace(has_structured_output_requests=True))
    assert FIGURES_SENT.on(sent) == {"drafted_steps": 1_000_000}
    assert FIGURES_SENT.on(EMPTY_MODEL_RUNNER_OUTPUT) is None  # vLLM's, shared by all empty outputs
    assert sent.req_ids == []


def across_processes(outputs: EngineCoreOutputs) -> EngineCoreOutputs:
    return MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(outputs))


def outputs_with(figures: Figures) -> EngineCoreOutputs:
    outputs = EngineCoreOutputs(scheduler_stats=SchedulerStats(num_running_reqs=2))
    send_figures({0: outputs}, figures)
    return outputs


def counting(kind: type[CountingScheduler], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A scheduler that has nothing of vLLM except how it counts drafts."""
    monkeypatch.setattr(Scheduler, "__init__", lambda self: None)
    scheduler: Any = object.__new__(kind)
    scheduler.num_spec_tokens, scheduler.log_stats = 7, True
    CountingScheduler.__init__(scheduler)
    return scheduler


def test_figures_travel_with_a_steps_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """To one API server of several, where they leave no trace. One client has no statistics."""
    scheduler = counting(V1Scheduler, monkeypatch)
    sent = [None, SchedulerStats(num_running_reqs=2), SchedulerStats()]
    outputs = dict(enumerate(EngineCoreOutputs(scheduler_stats=stats) for stats in sent))
    monkeypatch.setattr(Scheduler, "update_from_output", lambda *_: outputs)
    output, scheduled = ModelRunnerOutput([], {}), SimpleNamespace(total_num_scheduled_tokens=3)
    scheduler.update_from_output(scheduled, output)
    assert sent == [None, SchedulerStats(num_running_reqs=2), SchedulerStats()]
    FIGURES_SENT.attach(output, {"planned_tokens": 7_000_000})
    scheduler.update_from_output(scheduled, output)
    arrived = [across_processes(one).scheduler_stats for one in outputs.values()]
    assert [take_figures(stats) for stats in arrived if stats] == [{"planned_tokens": 7.0}, {}]
    assert arrived == [None, SchedulerStats(num_running_reqs=2), SchedulerStats()]
    send_figures({0: EngineCoreOutputs()}, {"skipped_steps": 1})  # statistics are turned off


def test_drafts_are_counted_not_slots_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Request c has draft slots that stayed empty; the drafts before it are not forgotten. Of e's
    nothing was reported."""
    scheduler = counting(CountingScheduler, monkeypatch)
    scheduler.verified_drafts = {"a": 4, "b": 2, "c": 0, "d": 4}
    stats = None
    for name, accepted in (("a", 3), ("b", 2), ("d", 0), ("e", 1), ("c", 0)):
        stats = scheduler.make_spec_decoding_stats(
            stats, 4, accepted, {"b": 1, "d": 1, "e": 1}, name
        )
    assert stats is not None
    assert (stats.num_drafts, stats.num_draft_tokens) == (4, 4 + 2 + 3 + 3)
    assert stats.num_accepted_tokens == 6


def config(pair: Pair, **fields: Any) -> VllmConfig:
    args = EngineArgs(str(pair.target), skip_tokenizer_init=True, served_model_name="demo")
    return replace(args, **fields).create_engine_config()


@pytest.fixture
def dflash(pair: Pair) -> Iterator[VllmConfig]:
    """Config of an engine with DFlash, in a process that was hooked for it."""
    yield config(pair, speculative_config={"method": "dflash", "model": str(pair.drafter)})
    unregister_vllm_metrics()


def shown(pattern: str) -> list[str]:
    return re.findall(pattern, generate_latest(REGISTRY).decode(), re.MULTILINE)


def test_counters_add_up_by_engine(dflash: VllmConfig) -> None:
    StatLoggerManager(dflash, [0, 1])
    manager = StatLoggerManager(dflash, [0, 1])  # built again
    assert isinstance(manager.stat_loggers[0], FigureLogger)  # vLLM's takes figures for adapters
    for engine, seconds in ((0, 250_000), (1, 500_000), (1, 1_000_000)):
        outputs = across_processes(outputs_with({"planning_seconds": seconds}))
        manager.record(outputs.scheduler_stats, None, engine_idx=engine)
    manager.record(None, None, engine_idx=1)
    assert shown("^vllm:dflash_planning_seconds_total.*") == [
        'vllm:dflash_planning_seconds_total{engine="0",model_name="demo"} 0.25',
        'vllm:dflash_planning_seconds_total{engine="1",model_name="demo"} 1.5',
    ]
    assert shown("^vllm:dflash_skipped_steps_total.*")[0].endswith(" 0.0")


@pytest.mark.parametrize("additional", [{}, {"something": "else"}])
def test_a_plain_engine_of_the_same_process_is_let_be(
    pair: Pair, dflash: VllmConfig, additional: dict[str, str]
) -> None:
    loggers = StatLoggerManager(config(pair, additional_config=additional)).stat_loggers
    assert not any(isinstance(one, FigureLogger) for one in loggers)
    assert shown("^vllm:num_requests_running")
    assert not shown("dflash")


def test_the_front_end_in_rust_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.envs.VLLM_USE_RUST_FRONTEND", True)
    assert outputs_with({"skipped_steps": 1}).scheduler_stats == SchedulerStats(num_running_reqs=2)
