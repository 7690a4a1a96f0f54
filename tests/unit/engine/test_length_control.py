"""Draft lengths step by step: who is asked, who agrees, and what is written into the record."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_dflash.engine.step_clock import StepClock
from vllm_dflash.engine.v1 import length_control
from vllm_dflash.engine.v1.length_control import MOST_REMEMBERED, LengthControl
from vllm_dflash.engine.v1.length_policy import FixedLength
from vllm_dflash.planning import Bools, Floats, Ints
from vllm_dflash.planning.step import Plan, Predicted, Step, StepEstimate


@pytest.fixture
def agreed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was sent from rank 0 to the others; a broadcast each."""
    sent: list[str] = []

    def plan_of_rank_0(plan: Plan) -> Plan:
        sent.append("agreed_plan")
        return plan

    def lengths_of_rank_0(lengths: Ints, from_text: Bools) -> tuple[Ints, Bools]:
        sent.append("agreed_lengths")
        return lengths, from_text

    monkeypatch.setattr(length_control, "agreed_plan", plan_of_rank_0)
    monkeypatch.setattr(length_control, "agreed_lengths", lengths_of_rank_0)
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
        return np.minimum(step.limits, 2) * step.plan.drafted


class FromText(Scripted):
    """Has everything verified that texts predict."""

    def lengths(self, step: Step, confidence: Floats) -> Ints:
        assert step.predicted is not None
        step.from_text = step.predicted.lengths > 0
        return step.predicted.lengths


FORETOLD = Predicted(np.array([0, 12]), np.array([0, 4]), np.zeros(2, int), np.zeros(2, int))


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


def test_a_step_that_rests_may_take_what_its_text_predicts(agreed: list[str]) -> None:
    """That uses up no other step of rest, and begins none."""
    control = LengthControl(7)
    first, free = Plan.nothing(2, skip_steps=2), Plan.nothing(2, skip_steps=9, uses_text=True)
    policy = control.policy = FromText(first, free, Plan.nothing(2))
    control.plan(step_of(7, 0))
    step = step_of(0, 0)
    assert control.take_skip(step)
    assert step.is_resting
    step.predicted = FORETOLD
    assert control.plan(step) is step.plan is free
    assert step.could_draft  # as in the step that was planned, whose limits are known
    assert control.choose(step, np.zeros(2, dtype=int), np.zeros((0, 0))).tolist() == [0, 12]
    assert step.from_text.tolist() == [False, True]
    assert step.nan_drafts == 0
    control.end(step)
    assert control.statistics.skipped_steps == 1
    resting = step_of(0, 0)
    assert control.take_skip(resting)
    assert resting.could_draft
    assert not control.take_skip(step_of(7, 0))
    assert policy.asked == 2


def test_ranks_take_the_same_drafts_from_texts(
    agreed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_rank_0 = np.array([3, 5]), np.array([True, False])
    monkeypatch.setattr(length_control, "agreed_lengths", lambda *_: of_rank_0)
    control, step = LengthControl(7), step_of(7, 7)
    step.predicted = FORETOLD
    control.policy = FromText(Plan.nothing(2, uses_text=True))
    control.plan(step)
    assert control.choose(step, np.zeros(2, dtype=int), np.zeros((0, 0))) is of_rank_0[0]
    assert step.lengths is of_rank_0[0]
    assert step.from_text is of_rank_0[1]


def test_free_drafts_are_known_until_they_are_verified(agreed: list[str]) -> None:
    """By name: the batch may be another one, and a request may have to wait."""
    control, step = LengthControl(7), step_of(7, 7)
    step.from_text = np.array([False, True])
    control.end(step)
    control.end(Step(["2"], np.array([1])))
    verifying = Step(["2", "1"], np.array([3, 4]), verified=np.array([5, 9]))
    control.observe_verification(verifying)
    assert verifying.verified_free.tolist() == [0, 9]
    assert control.statistics.draft_tokens == 14
    assert control.statistics.free_draft_tokens == 9
    assert control.statistics.free_accepted_tokens == 3
    control.end(verifying)
    after = Step(["1", "2"], np.array([1, 1]), verified=np.array([2, 0]))
    control.observe_verification(after)
    assert after.verified_free.tolist() == [0, 0]
    assert control.statistics.free_verifications == 1


def test_free_drafts_of_requests_that_ended_are_forgotten_some_day(agreed: list[str]) -> None:
    control, last = LengthControl(7), MOST_REMEMBERED + 1
    for name in range(last + 1):
        step = Step([str(name)], np.array([1]))
        step.from_text = np.array([True])
        control.end(step)
    verifying = Step(["0", str(last)], np.array([1, 1]), verified=np.array([5, 5]))
    control.observe_verification(verifying)
    assert verifying.verified_free.tolist() == [0, 5]


def test_another_batch_ends_the_skipping(agreed: list[str]) -> None:
    control = LengthControl(7)
    control.policy = Scripted(Plan.nothing(2, skip_steps=5), Plan.nothing(1))
    control.plan(step_of(7, 7))
    assert not control.take_skip(step_of(7))
    assert not control.take_skip(step_of(7, 7))  # what was said of this batch is long ago


def test_a_step_is_counted_and_learned_from_when_it_ends(agreed: list[str]) -> None:
    """With what the policy expected of it; and its own planning takes time, too."""
    observed: list[Step] = []

    class Learning(Scripted):
        def observe(self, step: Step) -> StepEstimate:  # type: ignore[override]
            observed.append(step)
            return StepEstimate(0.002, 0.0, 0.0, plain_seconds=0.001)

    control, step = LengthControl(7), step_of(7, 7)
    control.policy = Learning()
    step.target_seconds = 0.004
    control.end(step)
    assert observed == [step]
    assert step.planning_seconds > 0
    assert control.statistics.planning_seconds == step.planning_seconds
    assert control.statistics.to_dict()["costs_ms"]["step"] == {"estimated": 2.0, "measured": 4.0}


@pytest.mark.parametrize(
    ("skip_steps", "verified", "is_held"), [(3, 0, True), (3, 2, False), (0, 0, False)]
)
def test_undrafted_steps_are_timed_together_while_nobody_is_asked(
    agreed: list[str],
    monkeypatch: pytest.MonkeyPatch,
    skip_steps: int,
    verified: int,
    is_held: bool,
) -> None:
    """But for one that verified drafts, which the others are unlike."""
    held: list[bool] = []
    monkeypatch.setattr(StepClock, "finish", lambda _, step, *, hold: held.append(hold))
    control, step = LengthControl(7), step_of(7)
    control.policy = Scripted(Plan.nothing(1, skip_steps=skip_steps))
    control.plan(step)
    step.verified = np.array([verified])
    control.end(step)
    assert held == [is_held]


def test_a_plan_that_drafts_ends_the_skipping(agreed: list[str]) -> None:
    control = LengthControl(7)
    drafted = Plan(np.array([True]), width=2, price=1.0, speedup=1.0, skip_steps=3)
    control.policy = Scripted(drafted, Plan.nothing(1))
    control.plan(step_of(7))
    assert not control.take_skip(step_of(7))


def test_skipped_steps_draft_nobody(agreed: list[str]) -> None:
    control = LengthControl(7)
    control.policy = Scripted(Plan.nothing(3, skip_steps=1))
    control.plan(step_of(7, 0, 7))
    step = step_of(7, 0, 7)
    assert control.take_skip(step)
    assert step.plan.drafted.tolist() == [False] * 3
    assert step.could_draft


def test_logits_that_were_not_finite_are_counted_by_request(agreed: list[str]) -> None:
    """Against what was drafted of each, which its own limit may have cut."""
    control, step = LengthControl(7), step_of(7, 3, 2, 7)
    control.policy = Scripted(Plan(np.array([True, True, False, True]), 5, 1.0, 1.0))
    control.plan(step)
    usable = np.array([5, 1, 0, 0])
    assert control.choose(step, usable, np.ones((3, 5))).tolist() == [2, 1, 0, 0]
    assert step.nan_drafts == 0 + 2 + 5
    assert step.limits is usable


def test_steps_in_which_nobody_could_draft_are_no_skipped_ones(agreed: list[str]) -> None:
    control = LengthControl(7)
    control.policy = Scripted(Plan.nothing(1, skip_steps=1))
    for _ in range(2):
        step = step_of(0)
        if not control.take_skip(step):
            control.plan(step)
        control.end(step)
    assert (control.statistics.steps, control.statistics.skipped_steps) == (2, 0)
