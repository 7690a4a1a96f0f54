"""Faults that only a GPU shows, planted one at a time: the emulated GPU shows each of them.

A call raises, the host waits without being asked to, there is a race, or steps or counters differ.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from vllm import LLM

from emulated import races, torch_cuda
from support.engines import engine, fix_costs, proposer_of
from support.schedules import GRAPHS, ON_GPU, PROMPTS, SCENARIOS, SCHEDULES, Scenario, outcome_of
from vllm_dflash.engine.v2 import speculator
from vllm_dflash.engine.v2.device_step import DeviceStep
from vllm_dflash.engine.v2.exchange import HostCopy
from vllm_dflash.engine.v2.speculator import PlannedSpeculator

pytestmark = pytest.mark.emulated
FEW = Scenario(SCENARIOS["any length"].speculative, PROMPTS[:2])


class Seen:
    """Outcome, waits and races of an engine."""

    def __init__(self) -> None:
        self.outcome: dict[str, Any] = {}
        self.waits: dict[str, int] = {}
        self.races: dict[str, int] = {}


def look(
    patch: pytest.MonkeyPatch,
    *,
    has_graphs: bool = False,
    schedule: str = "latest",
    started: Callable[[LLM], None] = lambda llm: None,
    looks_for_races: bool = False,
) -> Seen:
    fix_costs(patch)
    seen, settings = Seen(), {**FEW.settings, **ON_GPU, **(GRAPHS if has_graphs else {})}
    watching: AbstractContextManager[dict[str, int]]
    watching = races.found() if looks_for_races else nullcontext({})
    with (
        watching as found,
        engine(async_scheduling=True, **settings) as llm,
    ):
        started(llm)
        SCHEDULES[schedule](llm)
        if looks_for_races:
            races.forget()
        torch_cuda.device().forget_counts()
        try:
            seen.outcome = outcome_of(llm, FEW)
        finally:
            SCHEDULES["latest"](llm)
        seen.waits = torch_cuda.device().waits()
    seen.races = found
    return seen


@pytest.fixture(scope="module")
def unharmed() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        seen = look(patch, looks_for_races=True)
    assert seen.waits == {}
    assert seen.races == {}
    return seen.outcome


def test_a_report_that_is_read_before_its_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds rubbish, which is not a valid count."""
    monkeypatch.setattr(HostCopy, "wait", lambda copy: copy._values)
    with pytest.raises(ValueError, match="NaN"):
        look(monkeypatch)
    torch.cuda.synchronize()


@pytest.mark.parametrize("schedule", ["latest", pytest.param("at once", marks=pytest.mark.slow)])
def test_a_report_on_a_stream_that_does_not_wait(
    schedule: str, unharmed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens are right. A schedule may hide the rest; the vector clocks do not."""
    side, original = torch.cuda.Stream(), HostCopy.__init__

    def without_a_wait(copy: HostCopy, tensor: torch.Tensor, _: Any) -> None:
        with torch.cuda.stream(side):
            original(copy, tensor, side)

    monkeypatch.setattr(HostCopy, "__init__", without_a_wait)
    seen = look(monkeypatch, schedule=schedule, looks_for_races=True)
    assert any("copy to pinned memory" in race for race in seen.races)
    assert (seen.outcome == unharmed) == (schedule == "at once")


def test_a_report_that_is_written_while_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step's report is written on the model's stream, which runs beside the copies'."""
    monkeypatch.setattr(HostCopy, "before_writing", lambda copy: None)
    seen = look(monkeypatch, looks_for_races=True)
    assert any("copy to pinned memory" in race for race in seen.races)


def test_a_copy_whose_source_is_freed_before_its_stream_has_read_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waits, but the stream is not recorded and the tensor is not held."""
    original = HostCopy.__init__

    def of_a_clone(copy: HostCopy, tensor: torch.Tensor, copy_stream: Any) -> None:
        original(copy, tensor.clone(), copy_stream)

    monkeypatch.setattr(HostCopy, "__init__", of_a_clone)
    seen = look(monkeypatch, looks_for_races=True)
    assert any("free" in race for race in seen.races)


def test_a_wait_of_the_host_within_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    original = DeviceStep.after_block

    def waiting(step: DeviceStep, batch: Any, **kwargs: Any) -> None:
        batch.slots.sum().item()
        original(step, batch, **kwargs)

    monkeypatch.setattr(DeviceStep, "after_block", waiting)
    assert look(monkeypatch).waits["item"] > 0


def test_an_index_of_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_host(drafter: PlannedSpeculator) -> torch.Tensor | None:
        slots = drafter.req_states.req_id_to_index
        fresh = [slots[name] for name in drafter.newly_admitted if name in slots]
        return torch.from_numpy(np.array(fresh, np.int64)) if fresh else None

    monkeypatch.setattr(PlannedSpeculator, "_fresh_slots", of_host)
    with pytest.raises(RuntimeError, match="same device"):
        look(monkeypatch)
    torch.cuda.synchronize()


def test_a_pinned_buffer_that_is_written_while_it_is_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pinned = torch.zeros(64, dtype=torch.int64, pin_memory=True)

    def too_early(data: np.ndarray, device: torch.device, **_: Any) -> torch.Tensor:
        pinned[: len(data)] = torch.from_numpy(data)
        copied = pinned[: len(data)].to(device, non_blocking=True)
        pinned.fill_(1 << 40)  # used for something else
        return copied

    monkeypatch.setattr(speculator, "async_tensor_h2d", too_early)
    with pytest.raises(RuntimeError, match="asynchronously reported"):
        look(monkeypatch)
    torch.cuda.synchronize()


def test_a_buffer_that_is_replaced_behind_its_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(llm: LLM) -> None:
        drafter = proposer_of(llm)
        drafter.confidence = torch.zeros_like(drafter.confidence)
        drafter.step.drafts = drafter.step.drafts._replace(confidence=drafter.confidence)

    with pytest.raises(RuntimeError, match="freed since it was captured"):
        look(monkeypatch, has_graphs=True, started=replace)
    torch.cuda.synchronize()


def test_a_question_within_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    original = PlannedSpeculator.sample_draft

    def asking(drafter: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        assert not bool(hidden.isinf().all())
        return original(drafter, hidden, *args, **kwargs)

    monkeypatch.setattr(PlannedSpeculator, "sample_draft", asking)
    with pytest.raises(RuntimeError, match="captur"):
        look(monkeypatch, has_graphs=True)
    torch.cuda.set_stream(torch.cuda.default_stream())
    torch.cuda.synchronize()


@pytest.mark.slow
def test_a_number_of_the_hosts_that_a_graph_has_baked_in(
    unharmed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It should count blocks, but stays what it was at capture."""
    original, blocks = PlannedSpeculator.sample_draft, [0]

    def counting(drafter: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        blocks[0] += 1
        drafts = original(drafter, hidden, *args, **kwargs)
        return (drafts + blocks[0]) % 1000

    monkeypatch.setattr(PlannedSpeculator, "sample_draft", counting)
    captured = []
    found = look(monkeypatch, has_graphs=True, started=lambda llm: captured.append(blocks[0]))
    assert blocks == captured
    accepted = found.outcome["counters"]["accepted_tokens"]
    assert 2 * accepted < unharmed["counters"]["accepted_tokens"]
