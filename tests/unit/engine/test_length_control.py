"""Draft lengths step by step: who is asked, who agrees, and what is written into the record."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_dflash.engine import length_control
from vllm_dflash.engine.length_control import LengthControl
from vllm_dflash.planning import Floats, Ints
from vllm_dflash.planning.fixed_length import FixedLength
from vllm_dflash.planning.step import Plan, Step


@pytest.fixture
def agreed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was sent from rank 0 to the others; a broadcast each."""
    sent: list[str] = []
    for name in ("agreed_plan", "agreed_lengths"):
        monkeypatch.setattr(
            length_control, name, lambda value, name=name: (sent.append(name), value)[1]
        )
    return sent


def step_of(*limits: int) -> Step:
    step = Step([str(i) for i in range(len(limits))], np.ones(len(limits), dtype=int))
    step.rows, step.limits = len(limits), np.array(limits)
    return step


class Scripted(FixedLength):
    """Drafts and skips as it is told."""

    is_same_everywhere = False

    def __init__(self, *plans: Plan) -> None:
        super().__init__(7)
        self.plans = list(plans)
        self.asked = 0

    def plan(self, step: Step) -> Plan:
        self.asked += 1
        return self.plans.pop(0)

    def lengths(self, step: Step, confidence: Floats) -> Ints:
        return np.minimum(step.limits[step.plan.drafted], 2)


def test_a_fixed_length_needs_no_word_between_ranks(agreed: list[str]) -> None:
    """Every rank comes to it by itself, so nothing is broadcast."""
    control, step = LengthControl(7), step_of(7, 0, 3)
    assert control.plan(step).drafted.tolist() == [True, False, True]
    assert control.choose(step, np.array([7, 0, 3]), np.ones((2, 7))).tolist() == [7, 0, 3]
    assert agreed == []


def test_what_is_measured_is_agreed_upon(agreed: list[str]) -> None:
    control, step = LengthControl(7), step_of(7, 7)
    control.policy = Scripted(Plan(np.array([False, True]), width=4, price=1.0, speedup=2.0))
    control.plan(step)
    control.choose(step, np.array([0, 3]), np.ones((1, 4)))
    assert agreed == ["agreed_plan", "agreed_lengths"]
    assert step.lengths.tolist() == [0, 2]
    assert step.nan_drafts == 1  # four were drafted, three can be used
    assert step.could_draft


def test_skipped_steps_are_counted_and_not_planned(agreed: list[str]) -> None:
    control = LengthControl(7)
    policy = control.policy = Scripted(
        Plan.nothing(2, skip_steps=2), Plan.nothing(2), Plan.nothing(1)
    )
    skipped = []
    for limits in ((7, 7), (7, 7), (7, 7), (7, 7), (7,)):
        step = step_of(*limits)
        skipped.append(control.take_skip(step))
        if not skipped[-1]:
            control.plan(step)
        control.end(step)
    assert skipped == [False, True, True, False, False]
    assert policy.asked == 3
    assert control.statistics.steps == control.statistics.skipped_steps == 5


def test_another_batch_ends_the_skipping(agreed: list[str]) -> None:
    control = LengthControl(7)
    control.policy = Scripted(Plan.nothing(2, skip_steps=5), Plan.nothing(1))
    control.plan(step_of(7, 7))
    assert not control.take_skip(step_of(7))
    assert not control.take_skip(step_of(7, 7))  # what was said of this batch is long ago


def test_steps_in_which_nobody_could_draft_are_no_skipped_ones(agreed: list[str]) -> None:
    control = LengthControl(7)
    control.policy = Scripted(Plan.nothing(1, skip_steps=1))
    for _ in range(2):
        step = step_of(0)
        if not control.take_skip(step):
            control.plan(step)
        control.end(step)
    assert (control.statistics.steps, control.statistics.skipped_steps) == (2, 0)
