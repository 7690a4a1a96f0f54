"""What `bench` and `parity` add to workers: vLLM refuses names that a worker already has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.utils.import_utils import resolve_obj_by_qualname

from support.fake_time import FakeTime
from vllm_dflash.engine.v1.v1_worker import V1CPUWorker
from vllm_dflash.engine.v2.v2_cpu_worker import V2CPUWorker
from vllm_dflash.engine.v2.v2_workers import GPUWorker
from vllm_dflash.tools import step_times
from vllm_dflash.tools.parity.check import engine_arguments
from vllm_dflash.tools.parity.recorder import RECORDED, RecordedDrafting
from vllm_dflash.tools.step_times import TIMED, TimedSteps


@pytest.mark.parametrize("name", [TIMED, RECORDED])
@pytest.mark.parametrize("worker", [V1CPUWorker, V2CPUWorker, GPUWorker])
def test_nothing_of_a_worker_is_replaced(name: str, worker: type) -> None:
    extension = resolve_obj_by_qualname(name)
    added = {one for one in dir(extension) if not one.startswith("__")}
    assert added
    assert not [one for one in added if hasattr(worker, one)]


def test_parity_asks_for_its_own() -> None:
    assert engine_arguments("d", "t", "float32", 64)["worker_extension_cls"] == RECORDED


@pytest.mark.parametrize(("eager", "requests"), [(False, 1), (True, 2)])
def test_what_cannot_be_recorded(eager: bool, requests: int) -> None:
    worker = RecordedDrafting()
    worker.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=eager),
        scheduler_config=SimpleNamespace(max_num_seqs=requests),
    )
    with pytest.raises(ValueError, match="needs enforce_eager=True and max_num_seqs=1"):
        worker.record_drafting()


class MadeUpRunner:
    """A step takes 20 s: 8 in the target, 5 in its head, and 7 elsewhere; drafting takes 18."""

    def __init__(self, clock: FakeTime, drafter: Any = None) -> None:
        self.clock = clock
        self.model = SimpleNamespace(compute_logits=self.compute_logits)
        self.drafter = drafter

    def step(self) -> None:
        self.execute_model(
            SimpleNamespace(
                total_num_scheduled_tokens=5,
                num_scheduled_tokens={"a": 3, "b": 1, "c": 1},
                scheduled_spec_decode_tokens={"a": [1, 2]},
                scheduled_cached_reqs=SimpleNamespace(req_ids=["a"]),
            )
        )
        self.model.compute_logits()
        self.clock.now += 2
        self.sample_tokens(None)

    def execute_model(self, scheduled: SimpleNamespace) -> None:
        self.clock.now += 4
        self._model_forward()

    def _model_forward(self) -> None:
        self.clock.now += 8

    def compute_logits(self) -> None:
        self.clock.now += 5

    def sample_tokens(self, grammar: None) -> SimpleNamespace:
        self.clock.now += 1
        if self.drafter is not None:
            self.propose_draft_token_ids(sampled=7)
            self._copy_draft_token_ids_to_cpu()
        return SimpleNamespace(sampled_token_ids=[[1, 2], [], [3]])

    def propose_draft_token_ids(self, sampled: int) -> None:
        self.drafter.model.combine_hidden_states()
        self.drafter.model.precompute_and_store_context_kv()
        self.clock.now += 4
        self.model.compute_logits()  # borrowed by the drafter

    def _copy_draft_token_ids_to_cpu(self) -> None:
        self.clock.now += 3

    def take_draft_token_ids(self) -> None:
        self.clock.now += 1000


def times_of_two_steps(
    worker: TimedSteps, clock: FakeTime, runner: MadeUpRunner
) -> dict[str, float]:
    worker.model_runner = runner
    before = worker.step_times()
    for _ in range(2):
        runner.step()
    after = worker.step_times()
    return {name: after[name] - before[name] for name in after if ":" not in name}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    clock = FakeTime()
    monkeypatch.setattr(step_times, "time", clock)
    return clock


def test_parts_of_a_step_without_drafts(clock: FakeTime) -> None:
    assert times_of_two_steps(TimedSteps(), clock, MadeUpRunner(clock)) == {
        "steps": 2,
        "tokens": 6,
        "seconds": 40,
        "target": 26,
        "draft": 0,
        "drafts": 0,
    }


def test_kinds_of_steps(clock: FakeTime) -> None:
    """Each request and each draft has a row; other rows belong to prompts."""
    worker, runner = TimedSteps(), MadeUpRunner(clock)
    worker.model_runner = runner
    worker.step_times()
    a, drafts = {"a": 3}, {"a": [1, 2]}
    for rows, counts, given in ((3, a, drafts), (4, {"a": 3, "b": 1}, drafts), (3, a, {})):
        is_first = not given
        clock.now += 50 * is_first  # nothing was in flight
        runner.execute_model(
            SimpleNamespace(
                total_num_scheduled_tokens=rows,
                num_scheduled_tokens=counts,
                scheduled_spec_decode_tokens=given,
                scheduled_cached_reqs=SimpleNamespace(req_ids=[] if is_first else ["a"]),
            )
        )
        runner.sample_tokens(None)
    times = worker.step_times()
    of = {
        kind: [
            times[f"{kind}: {what}"] for what in ("steps", "seconds", "rows", "drafts", "tokens")
        ]
        for kind in ("decoding", "decoding, drafts", "prompts", "prompts, drafts")
    }
    assert of == {
        "decoding": [0, 0, 0, 0, 0],
        "decoding, drafts": [2, 26, 7, 4, 6],
        "prompts": [1, 13, 3, 0, 3],
        "prompts, drafts": [0, 0, 0, 0, 0],
    }


class MadeUpDrafter:
    step: Any = None

    def __init__(self, clock: FakeTime) -> None:
        self.clock = clock
        self.model = SimpleNamespace(
            combine_hidden_states=self.take_two, precompute_and_store_context_kv=self.take_two
        )

    def take_two(self) -> None:
        self.clock.now += 2

    def end_step(self) -> None:
        """Planning takes time in here, too."""
        self.clock.now += 2
        if self.step is not None:
            self.step.planning_seconds += 0.25
        self.step = None


def test_vllms_drafter_borrows_the_targets_head_and_stores_context(clock: FakeTime) -> None:
    runner = MadeUpRunner(clock, MadeUpDrafter(clock))
    assert times_of_two_steps(TimedSteps(), clock, runner) == {
        "steps": 2,
        "tokens": 6,
        "seconds": 2 * 36,
        "target": 26,
        "draft": 2 * (4 + 5 + 3),
        "context": 2 * 4,
        "drafts": 2,
    }


def test_of_ours_each_step_has_timed_its_parts(clock: FakeTime) -> None:
    class OurWorker(TimedSteps):
        def dflash_stats(self) -> None:
            raise AssertionError("that takes its time")

    drafter = MadeUpDrafter(clock)
    runner = MadeUpRunner(clock, drafter)
    worker = OurWorker()
    worker.model_runner = runner
    worker.step_times()
    for context in (1.5, 2.5):
        runner.step()
        drafter.step = SimpleNamespace(context_seconds=context, planning_seconds=0.25)
        drafter.end_step()
    drafter.end_step()  # without a step
    times = worker.step_times()
    assert times["seconds"] == 36 + 2 + 36  # time after a step belongs to the next
    assert times["context"] == 1.5 + 2.5
    assert times["planning"] == 2 * 0.5
    assert times["draft"] == 2 * (2 + 2 + 4 + 5 + 3) + 3 * 2 - 4 - 1
