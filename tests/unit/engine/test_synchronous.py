"""Synchronous scheduling on V2: what the device does while the host plans."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.outputs import DraftTokenIds

from vllm_dflash.engine.length_control import LengthControl
from vllm_dflash.engine.text_drafts import TextDrafts
from vllm_dflash.engine.v2.host_copy import texts_on_host
from vllm_dflash.engine.v2.synchronous import SynchronousLengths
from vllm_dflash.planning import Floats, Ints
from vllm_dflash.planning.fixed_length import FixedLength
from vllm_dflash.planning.step import Plan, Step

K = 3
CONFIDENCE = torch.tensor([[0.9, 0.8, 0.7], [0.6, -1.0, 0.5]])


class Scripted(FixedLength):
    """Drafts everybody or nobody, as it is told; and notes when it is asked."""

    def __init__(self, events: list[str], drafts: list[bool]) -> None:
        super().__init__(K)
        self.events, self.drafts = events, drafts
        self.confidence: list[Any] = []

    def plan(self, step: Step) -> Plan:
        self.events.append("plan")
        return super().plan(step) if self.drafts.pop(0) else Plan.nothing(step.num_requests)

    def lengths(self, step: Step, confidence: Floats) -> Ints:
        self.confidence.append(confidence.round(1).tolist())
        return super().lengths(step, confidence)


class Engine:
    """Two requests, the second of which has room for two tokens more."""

    def __init__(self, *drafts: bool, runs_ahead: bool) -> None:
        self.events: list[str] = []
        control = LengthControl(K)
        self.policy = control.policy = Scripted(self.events, list(drafts))
        self.synchronous = SynchronousLengths(control, K, CONFIDENCE, runs_ahead=runs_ahead)

    def step(self, most: int = K, limits: tuple[int, int] = (100, 94)) -> list[int]:
        def run(runs_block: bool) -> torch.Tensor:
            self.events.append("block" if runs_block else "context")
            return torch.tensor([[1, 2, 3], [4, 5, 6]])

        batch: Any = SimpleNamespace(
            req_ids=["a", "b"],
            num_tokens=6,
            num_draft_tokens_per_req=np.array([3, 2]),
            num_computed_tokens_np=np.array([10, 90]),
            num_scheduled_tokens=np.array([4, 3]),
            idx_mapping_np=np.array([2, 0]),
        )
        drafts = self.synchronous.propose(
            run,
            batch,
            torch.tensor([3, 1]),
            torch.tensor([1, 2]),
            most=most,
            limits=np.array(limits),
            newly_admitted=(),
        )
        step = self.synchronous.step
        assert step is not None
        self.draft_rows, self.last = step.draft_rows, step
        cut = self.synchronous.cut(DraftTokenIds(["a", "b"], drafts.tolist()))
        self.synchronous.end_step()
        self.tokens = cut.draft_token_ids
        return [len(tokens) for tokens in self.tokens]


@pytest.mark.parametrize("runs_ahead", [True, False])
def test_the_same_drafts_in_either_order(runs_ahead: bool) -> None:
    """`b` ends with token 94, and its second draft is not finite."""
    engine = Engine(True, True, False, False, True, runs_ahead=runs_ahead)
    assert [engine.step() for _ in range(5)] == [[3, 1], [3, 1], [0, 0], [0, 0], [3, 1]]
    sure = [pytest.approx([0.9, 0.8, 0.7]), pytest.approx([0.6, 0.0, 0.0])]
    assert engine.policy.confidence == [sure] * 3
    statistics = engine.synchronous.lengths.statistics
    assert (statistics.verifications, statistics.draft_tokens) == (10, 25)
    assert statistics.accepted_tokens == 10
    assert statistics.drafted_steps == 3


def test_each_is_cut_by_its_own_confidence() -> None:
    """Not by that of `a`, which is at its end."""
    engine = Engine(True, runs_ahead=False)
    assert engine.step(limits=(14, 100)) == [0, 1]
    assert engine.policy.confidence == [[pytest.approx([0.6, 0.0, 0.0])]]


def test_where_drafting_goes_on_the_device_works_while_the_host_plans() -> None:
    engine = Engine(True, True, False, False, True, runs_ahead=True)
    for _ in range(5):
        engine.step()
    assert engine.events == [
        *("plan", "block"),
        *("block", "plan"),
        *("block", "plan"),  # for nothing
        *("plan", "context"),
        *("plan", "block"),
    ]


def test_a_block_that_ran_for_nothing_is_charged_as_drafting() -> None:
    """Its time would else be taken for the target's."""
    engine = Engine(True, False, False, runs_ahead=True)
    rows = [(engine.step(), engine.draft_rows)[1] for _ in range(3)]
    assert rows == [2 * (1 + K), 2 * (1 + K), 0]


def test_no_block_is_launched_for_a_scheduler_that_takes_none() -> None:
    engine = Engine(True, True, runs_ahead=True)
    engine.step()
    assert engine.step(most=0) == [0, 0]
    assert engine.events == ["plan", "block", "plan", "context"]


class FromText(Scripted):
    """Has two drafts verified of each request whose text foretells some, and one of the others."""

    skip_steps = 0

    def plan(self, step: Step) -> Plan:
        uses_text = step.foretold is not None and bool(step.foretold.lengths.any())
        plan = Plan.nothing(0) if step.is_resting else super().plan(step)
        if not plan.width:
            skip_steps = self.skip_steps
            return Plan.nothing(step.num_requests, skip_steps=skip_steps, uses_text=uses_text)
        return replace(plan, uses_text=uses_text)

    def lengths(self, step: Step, confidence: Floats) -> Ints:
        assert step.foretold is not None
        step.from_text = step.foretold.lengths > 0
        return np.where(step.from_text, 2, np.minimum(step.limits, 1))


class ReadingEngine(Engine):
    """The text of `a` has 14 tokens, of which the last two stood there before."""

    def __init__(self, *drafts: bool, runs_ahead: bool = False) -> None:
        super().__init__(*drafts, runs_ahead=runs_ahead)
        self.policy = FromText(self.events, list(drafts))
        self.synchronous.lengths.policy = self.policy
        texts = np.arange(1000, 1000 + 3 * 128, dtype=np.int32).reshape(3, 128)
        texts[2, 2:7] = [11, 12, 1, 2, 9]
        texts[2, 12:14] = [11, 12]
        self.synchronous.read_texts(TextDrafts(2, 128, K), texts)


@pytest.mark.parametrize("runs_ahead", [True, False])
def test_what_a_text_foretells_takes_the_place_of_a_block(runs_ahead: bool) -> None:
    engine = ReadingEngine(True, True, runs_ahead=runs_ahead)
    for _ in range(2):
        assert engine.step() == [2, 1]
        assert engine.tokens == [[1, 2], [4]]
        assert engine.last.agreed.tolist() == [2, 0]  # the third is 3 in the block, 9 in the text
    statistics = engine.synchronous.lengths.statistics
    assert (statistics.free_verifications, statistics.free_draft_tokens) == (1, 3)
    assert statistics.free_accepted_tokens == 2
    assert statistics.draft_lengths.tolist() == [2, 2, 0, 0]


def test_free_drafts_need_no_block() -> None:
    engine = ReadingEngine(False)
    assert engine.step() == [2, 0]
    assert engine.tokens == [[1, 2], []]
    assert engine.events == ["plan", "context"]
    assert engine.draft_rows == 0
    assert engine.synchronous.lengths.statistics.skipped_steps == 1


def test_nothing_is_foretold_to_a_request_at_its_end() -> None:
    """No draft could be used, whoever made it."""
    engine = ReadingEngine(False)
    assert engine.step(limits=(15, 94)) == [0, 0]
    assert engine.last.foretold is None
    assert engine.events == ["plan", "context"]


def test_a_step_that_rests_is_planned_where_a_text_foretells_something() -> None:
    engine = ReadingEngine(False, False)
    assert isinstance(engine.policy, FromText)
    engine.policy.skip_steps = 2
    assert engine.step(limits=(15, 94)) == [0, 0]
    assert engine.step() == [2, 0]
    assert engine.last.is_resting
    assert engine.step(limits=(15, 94)) == [0, 0]  # which shows what became of it
    assert engine.last.is_resting
    assert engine.last.foretold is not None
    assert engine.last.foretold.known.tolist() == [3, 0]
    assert engine.step(limits=(15, 94)) == [0, 0]
    assert not engine.last.is_resting
    assert engine.events == ["plan", *["context"] * 3, "plan", "context"]


@pytest.mark.parametrize("kind", ["of the host", "unified", "on the device"])
def test_texts_that_the_host_can_read(kind: str) -> None:
    written = np.zeros((2, 3), np.int32)
    if kind == "of the host":
        texts = SimpleNamespace(device=torch.device("cpu"), gpu=torch.from_numpy(written))
    else:
        texts = SimpleNamespace(device=torch.device("cuda"), gpu=None)
    if kind == "unified":
        texts._uva_buf = SimpleNamespace(np=written)
    states: Any = SimpleNamespace(all_token_ids=texts)
    found = texts_on_host(states)
    if kind == "on the device":
        assert found is None
        return
    assert found is not None
    written[1, 2] = 7
    assert found[1, 2] == 7
