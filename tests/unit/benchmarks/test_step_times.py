"""`benchmarks/loads --where`: times of the parts of steps, by a runner and a clock made up here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from loads import step_times
from loads.step_times import KINDS, OF_A_KIND, TimedSteps
from support.fake_time import FakeTime


class MadeUpRunner:
    """A step takes 12 s in the target, 12 drafting, and 5 elsewhere; what ends it, 2 more."""

    record: Any = None

    def __init__(self, clock: FakeTime) -> None:
        self.clock = clock
        self.model = SimpleNamespace(compute_logits=lambda: self.takes(4))
        self.drafter = self
        self._model_forward = lambda: self.takes(8)
        self._copy_draft_token_ids_to_cpu = self.take_draft_token_ids = lambda: self.takes(3)

    def takes(self, seconds: float) -> None:
        self.clock.now += seconds

    def execute_model(self, scheduled: SimpleNamespace) -> None:
        self.takes(4)
        self._model_forward()

    def sample_tokens(self, grammar: None) -> SimpleNamespace:
        self.takes(1)
        self.model.compute_logits()
        self.propose_draft_token_ids(sampled=7)
        self._copy_draft_token_ids_to_cpu()
        return SimpleNamespace(sampled_token_ids=[[1, 2], [], [3]])

    def propose_draft_token_ids(self, sampled: int) -> None:
        self.takes(5)
        self.model.compute_logits()  # borrowed by the drafter

    def end_step(self) -> None:
        """Planning takes time in here, too."""
        self.takes(2)
        self.record.planning_seconds += 0.25


class OurWorker(TimedSteps):
    def dflash_stats(self) -> None:
        raise AssertionError("that takes its time")


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> OurWorker:
    clock, worker = FakeTime(), OurWorker()
    monkeypatch.setattr(step_times, "time", clock)
    worker.model_runner = MadeUpRunner(clock)
    worker.step_times()
    return worker


def run(worker: OurWorker, rows: int, drafts: int, running: str = "a") -> None:
    scheduled = SimpleNamespace(
        total_num_scheduled_tokens=rows,
        num_scheduled_tokens={"a": rows},
        scheduled_spec_decode_tokens={"a": [7] * drafts},
        scheduled_cached_reqs=SimpleNamespace(req_ids=[*running]),
    )
    worker.model_runner.execute_model(scheduled)
    worker.model_runner.sample_tokens(None)


def test_parts_of_a_step(worker: OurWorker) -> None:
    for context in (1.5, 2.5):
        run(worker, rows=1, drafts=0)
        worker.model_runner.record = SimpleNamespace(context_seconds=context, planning_seconds=0.25)
        worker.model_runner.end_step()
    times = worker.step_times()
    assert (times["steps"], times["drafts"], times["tokens"]) == (2, 2, 6)
    assert times["seconds"] == 29 + 2 + 29  # time after a step belongs to the next
    assert times["target"] == 2 * 12
    assert (times["context"], times["planning"]) == (4, 2 * 0.5)
    assert times["draft"] == 2 * (12 + 2) - 4 - 1


def test_kinds_of_steps(worker: OurWorker) -> None:
    """A request and each of its drafts have a row; other rows belong to a prompt."""
    worker.model_runner.takes(50)  # nothing was in flight
    run(worker, rows=3, drafts=0, running="")
    run(worker, rows=3, drafts=2)
    times = worker.step_times()
    of = {kind: [times[f"{kind}: {what}"] for what in OF_A_KIND] for kind in KINDS}
    assert of["prompts"] == [1, 29, 3, 0, 3]
    assert of["decoding, drafts"] == [1, 29, 3, 2, 3]
    assert of["decoding"] == of["prompts, drafts"] == [0] * 5
