"""What the speculator adds to vLLM's, without a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

from support.pairs import drafter_config
from vllm_dflash.checkpoint.read import parse_config
from vllm_dflash.config.engine_options import EngineOptions
from vllm_dflash.engine.reporting.statistics import DraftStatistics
from vllm_dflash.engine.v2 import loaded_speculator
from vllm_dflash.engine.v2 import speculator as module
from vllm_dflash.engine.v2.draft_slots import Batch, Drafts, DraftSlots
from vllm_dflash.engine.v2.exchange import (
    COUNTED,
    OUTCOMES,
    PLAN,
    ReportedOutput,
    StepPlan,
)
from vllm_dflash.engine.v2.grading import OUTCOME_COLUMNS
from vllm_dflash.engine.v2.loaded_speculator import DFlashSpeculatorBase
from vllm_dflash.engine.v2.speculator import PlannedSpeculator
from vllm_dflash.engine.v2.text_look_up import has_room_for_texts
from vllm_dflash.planning.step import BLOCK

K, SLOTS, CPU = 3, 6, torch.device("cpu")
BATCH: Any = SimpleNamespace(num_reqs=4, idx_mapping=torch.arange(4))
ONES = torch.ones(4, dtype=torch.int32)


def bare() -> Any:
    made: Any = object.__new__(PlannedSpeculator)
    made.device, made.num_speculative_steps = CPU, K
    made.options = SimpleNamespace(num_speculative_tokens=K)
    made.draft_tokens = made.draft_output = torch.zeros(SLOTS, K, dtype=torch.int64)
    made.trees, made.num_query_per_req, made.max_num_tokens = None, 1 + K, SLOTS * (1 + K)
    made.free_drafts, made.runs_target_alone = None, False
    texts = torch.zeros(SLOTS, 9, dtype=torch.int32)
    made.batch = Batch.allocate(SLOTS, texts, texts[:, 0], torch.zeros(SLOTS, 1))
    made.slots, made.outcomes = DraftSlots(SLOTS, K, CPU), torch.zeros(SLOTS, OUTCOME_COLUMNS + K)
    made.drafts = Drafts(made.draft_tokens, *torch.zeros(2, SLOTS, K))
    made.statistics, made.plan, made._fresh = DraftStatistics(K), StepPlan(), set()
    made._copies = made._report = None
    made._has_fused_taps = True
    made.req_states = SimpleNamespace(req_id_to_index={"a": 4, "b": 0, "c": 5, "d": 2})
    return made


def scheduled(plan: StepPlan, new: tuple[str, ...] = ()) -> Any:
    step: Any = SimpleNamespace(
        num_spec_tokens_to_schedule=K,
        total_num_scheduled_tokens=4,
        scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in new],
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
    )
    PLAN.attach(step, plan)
    return step


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What runs in the speculator's steps: `grade` with its arguments, and vLLM's own, a block or
    not."""
    seen: list[Any] = []
    monkeypatch.setattr(module, "grade", lambda *given: seen.append(given))
    monkeypatch.setattr(
        DFlashSpeculator, "propose", lambda drafter, *_, **__: seen.append(drafter.runs_block)
    )
    return seen


def propose(speculator: Any, plan: StepPlan, *new: str, **options: Any) -> torch.Tensor:
    """Run a step of four requests."""
    speculator.begin_step(scheduled(plan, new))
    options = {"num_speculative_tokens": K} | options
    found: torch.Tensor = speculator.propose(
        BATCH, None, None, None, [torch.ones(4, 2)], 2 * ONES, ONES, **options
    )
    return found


def test_slots_of_new_requests_are_forgotten_before_they_are_graded(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No others are: `c` and `b` are new, `gone` has left again."""
    speculator = bare()
    speculator.slots.records[:, 0] = BLOCK
    monkeypatch.setattr(
        module, "grade", lambda slots, *_: launched.append(slots.records[:, 0].tolist())
    )
    propose(speculator, StepPlan(runs_block=True), "c", "b", "gone")
    assert launched == [[0, 1, 1, 1, 1, 0], True]


@pytest.mark.parametrize(
    ("plans_block", "room", "runs"), [(True, K, 1), (False, K, 0), (True, 0, 0), (True, None, 1)]
)
def test_whether_a_block_runs_is_planned(
    launched: list[Any], plans_block: bool, room: int | None, runs: int
) -> None:
    """vLLM 0.33 has no room for drafts after some steps, whatever was planned."""
    speculator = bare()
    propose(speculator, StepPlan(runs_block=plans_block, length=2), num_speculative_tokens=room)
    assert launched[1] == runs
    counted = speculator.statistics
    assert (counted.steps, counted.drafted_steps, counted.skipped_steps) == (1, runs, 1 - runs)
    assert counted.planned_tokens == 2 * 4 * runs


def test_each_requests_own_length_is_counted(launched: list[Any]) -> None:
    """As the scheduler counts it for `/metrics`, and not the longest for all."""
    speculator = bare()
    lengths = {"a": 3, "b": 0, "c": 1, "d": 3}
    propose(speculator, StepPlan(runs_block=True, length=3, lengths=lengths))
    counted = speculator.statistics
    assert (counted.drafted_requests, counted.planned_tokens) == (4, 7)
    assert counted.to_dict()["draft_lengths"] == [1, 1, 0, 2]


def test_dummy_runs_draft_blocks_for_nobody(launched: list[Any]) -> None:
    """And count nothing, whatever was planned for the step before. Those without room for a block
    of each request, or of the target alone, do not reach the drafter."""
    speculator = bare()
    speculator.batch.slots[:4] = 1
    propose(speculator, StepPlan(runs_block=False), dummy_run=True)
    assert launched == [True]
    assert (speculator.batch.slots == -1).all()
    assert speculator.num_dummy_requests == 4
    assert speculator.statistics.steps == 0
    speculator.max_num_tokens = 4 * (1 + K) - 1
    propose(speculator, StepPlan(), dummy_run=True)
    speculator.max_num_tokens, speculator.runs_target_alone = 100, True
    propose(speculator, StepPlan(), dummy_run=True)
    assert launched == [True]
    assert speculator._report is None


def test_outcomes_are_reported_where_the_plan_wants_them(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are graded in the very step."""
    speculator = bare()
    output: Any = SimpleNamespace(model_runner_output="its", get_output=SimpleNamespace)
    for number, reports in enumerate((True, False, True)):

        def graded(slots: DraftSlots, *given: Any, number: int = number) -> None:
            given[4][:], slots.counts_before[:] = number, 10 + number

        monkeypatch.setattr(module, "grade", graded)
        propose(speculator, StepPlan(reports=reports))
        wrapped = speculator.wrap_output(output)
        speculator.outcomes[:] = speculator.slots.counts_before[:] = -1  # by the next step
        if not reports:
            assert wrapped is output
            continue
        assert isinstance(wrapped, ReportedOutput)
        found = wrapped.get_output()
        table, counts = OUTCOMES.on(found), COUNTED.on(found)
        assert table is not None
        assert counts is not None
        assert table.tolist() == [[number] * (OUTCOME_COLUMNS + K)] * 4
        assert (counts == 10 + number).all()
        assert speculator.statistics.draft_tokens == 2 * (10 + number)


def test_a_report_is_copied_before_the_next_step_writes_over_it(launched: list[Any]) -> None:
    speculator = bare()
    propose(speculator, StepPlan(reports=True))
    waited: list[int] = []
    speculator._report = SimpleNamespace(before_writing=lambda: waited.append(len(launched)))
    for _ in range(2):
        propose(speculator, StepPlan(reports=False))
    assert waited == [2]  # once, and before the second step is graded


def test_what_the_scheduler_has_counted_is_shown_by_the_worker() -> None:
    speculator, counting = bare(), DraftStatistics(K)
    counting.probes, counting.planning_seconds, counting.step_seconds = 3, 0.5, 2.0
    speculator.statistics.steps = 7
    for plan in (StepPlan(counted=counting.scheduler_counters()), StepPlan()):
        speculator.begin_step(scheduled(plan))
        assert speculator.plan is plan
        shown = speculator.statistics.to_dict()
        assert (shown["steps"], shown["probes"], shown["planning_share"]) == (7, 3, 0.25)


class Target(nn.Module):
    """A target with two taps."""

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return rows, [rows + 1, rows + 2]


class Compiled(Target):
    """One whose class runs no hooks, as `torch.compile` makes of it."""

    def __call__(self, rows: torch.Tensor) -> Any:
        return self.forward(rows)


@pytest.mark.parametrize(("kind", "num_taps"), [(Target, 1), (Compiled, 2)])
def test_taps_are_fused_once(kind: type[Target], num_taps: int) -> None:
    """The target fuses them, so that its graphs do it, or else the drafter when given them."""
    speculator, target = bare(), kind()
    fused: list[list[float]] = []

    def combine(taps: torch.Tensor) -> torch.Tensor:
        fused.append(taps.flatten().tolist())
        return 10 * taps

    speculator.model = SimpleNamespace(combine_hidden_states=combine)
    speculator._fuse_taps_in(target)
    hidden, taps = target(torch.tensor([[1.0]]))
    assert hidden.tolist() == [[1]]
    assert len(taps) == num_taps
    assert speculator.fused_taps(taps).tolist() == [[20, 30]]
    assert fused == [[2, 3]]


@pytest.mark.parametrize("runs_block", [True, False])
def test_drafts_are_chosen_in_every_step(monkeypatch: pytest.MonkeyPatch, runs_block: bool) -> None:
    """For the batch's first requests: a graph may have more rows than there are requests."""
    speculator, ran = bare(), list[Any]()
    speculator.runs_block = runs_block
    speculator.free_drafts = SimpleNamespace(look_up=lambda batch: ran.append(batch.slots.tolist()))
    speculator.batch.slots[:3] = torch.tensor([4, 0, 2])
    monkeypatch.setattr(
        DFlashSpeculator, "_generate_draft", lambda _, count, *__: ran.append(f"block of {count}")
    )
    monkeypatch.setattr(module, "learn_overall", lambda *_: ran.append("learned"))
    monkeypatch.setattr(module, "choose", lambda *_, has_block: ran.append(has_block))
    speculator._generate_draft(5, "metadata")
    assert ran == [
        *(["block of 5"] * runs_block),
        *("learned", [4, 0, 2, -1, -1], runs_block),
    ]


@pytest.mark.parametrize(("samples_from_anchor", "rows"), [(False, 1 + K), (True, K)])
def test_a_block_has_as_many_rows_as_in_training(
    monkeypatch: pytest.MonkeyPatch, samples_from_anchor: bool, rows: int
) -> None:
    """vLLM's speculator, which knows no other blocks, gives each a row more than it has drafts."""
    spec = parse_config("drafter", drafter_config())
    spec = spec.model_copy(update={"sample_from_anchor": samples_from_anchor})
    options = EngineOptions(K, K, "fixed", spec)
    monkeypatch.setattr(EngineOptions, "from_config", lambda _: options)
    monkeypatch.setattr(loaded_speculator, "room_for_blocks", lambda config: config)
    of_vllm = {"num_query_per_req": 1 + K, "sample_from_anchor": False}
    monkeypatch.setattr(
        DFlashSpeculator, "__init__", lambda made, *_: made.__dict__.update(of_vllm)
    )
    config: Any = SimpleNamespace()
    made = DFlashSpeculatorBase(config, CPU)
    assert (made.num_query_per_req, made.sample_from_anchor) == (rows, samples_from_anchor)


@pytest.mark.parametrize(("length", "fits"), [(1 << 16, True), (1 << 20, False)])
def test_texts_that_would_take_too_much_memory_are_not_looked_up(length: int, fits: bool) -> None:
    assert has_room_for_texts(1024, length) is fits


@pytest.mark.parametrize("version", ["0.32", "0.33"])
def test_the_newest_context_is_kept_for_lilicorr(version: str) -> None:
    """It is the context of each request's last row that was not rejected. For padding, any row that
    exists will do."""
    speculator = bare()
    speculator.hidden_states = torch.arange(20.0).view(10, 2)
    speculator.newest_context = None
    starts = torch.tensor([0, 4, 5, 5, 5], dtype=torch.int32)
    rejected = torch.tensor([1, 0, 9, 0], dtype=torch.int32)
    where: tuple[Any, ...] = (3, starts)
    if version == "0.32":
        where = (SimpleNamespace(num_reqs=3, query_start_loc=starts),)
    speculator.prepare_context_anchor(*where, rejected)  # another drafter does not need it
    speculator.newest_context = torch.full((4, 2), -1.0)
    speculator.prepare_context_anchor(*where, rejected)
    assert speculator.newest_context.tolist() == [[4, 5], [8, 9], [0, 1], [-1, -1]]
