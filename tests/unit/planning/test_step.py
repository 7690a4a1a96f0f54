"""What a step says about itself, and how steps are timed, with a fake clock."""

import numpy as np
import pytest

from support.fake_time import FakeTime
from vllm_dflash.engine import step_clock
from vllm_dflash.engine.step_clock import StepClock
from vllm_dflash.planning import step as step_module
from vllm_dflash.planning.step import COUNTS, Outcomes, StepRecord


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    time = FakeTime()
    for module in (step_clock, step_module):
        monkeypatch.setattr(module, "time", time)
    return time


def decoding(*ids: str) -> StepRecord:
    return StepRecord(ids, np.ones(len(ids), dtype=int), rows=len(ids))


def finish(clock: StepClock, fake: FakeTime, step: StepRecord, seconds: float) -> StepRecord:
    fake.now += seconds
    clock.finish(step)
    return step


@pytest.mark.parametrize(
    ("produced", "verified", "rows", "accepted", "prompt_rows", "only_decodes"),
    [
        ([1], [0], 1, [0], 0, True),  # one token of decoding
        ([0], [0], 9, [0], 9, False),  # a chunk of a prompt
        ([1], [0], 5, [0], 4, False),  # the last chunk, which yields a token
        ([4], [3], 4, [3], 0, True),  # three drafts, all of them accepted
        ([1], [5], 6, [0], 0, True),  # five drafts, none accepted
        ([0], [2], 8, [0], 6, False),  # drafts beside a discarded sample count as a prompt
        ([1, 0], [0, 0], 1, [0, 0], 0, False),  # one request ran no row
        ([0, 1, 1, 4, 1], [0, 0, 0, 3, 5], 76, [0, 0, 0, 3, 0], 64, False),  # all of these together
        ([], [], 0, [], 0, False),
    ],
)
def test_a_step_tells_prompts_drafts_and_decoding_apart(
    produced: list[int],
    verified: list[int],
    rows: int,
    accepted: list[int],
    prompt_rows: int,
    only_decodes: bool,
) -> None:
    step = StepRecord("pqabc"[: len(produced)], np.array(produced, dtype=int), rows=rows)
    step.verified = np.array(verified, dtype=int)
    assert step.num_requests == len(produced)
    assert step.decoding.tolist() == [count > 0 for count in produced]
    assert step.accepted.tolist() == accepted
    assert step.prompt_rows == prompt_rows
    assert step.only_decodes is only_decodes


def test_the_first_step_after_a_pause_is_not_timed(fake: FakeTime) -> None:
    clock = StepClock()
    first = finish(clock, fake, decoding("a"), 1.0)
    assert (first.seconds, first.target_seconds) == (0.0, 0.0)
    second = finish(clock, fake, decoding("a", "b"), 2.0)
    assert second.seconds == second.target_seconds == pytest.approx(2.0)
    fake.now += 60  # nothing to do
    assert finish(clock, fake, decoding("c"), 1.0).seconds == 0.0


def test_draft_and_context_belong_to_the_step_that_paid_for_them(fake: FakeTime) -> None:
    clock = StepClock()
    finish(clock, fake, decoding("a"), 1.0)
    step = decoding("a")
    fake.now += 2.0
    with step.timing("draft"):
        fake.now += 0.5
    with step.timing("context"):
        fake.now += 0.25
    with step.timing("planning"):
        fake.now += 0.125
    clock.finish(step)
    assert (step.draft_seconds, step.context_seconds, step.planning_seconds) == (0.5, 0.25, 0.125)
    assert step.seconds == pytest.approx(2.875)
    assert step.target_seconds == pytest.approx(2.125)
    assert finish(clock, fake, decoding("a"), 1.0).target_seconds == pytest.approx(1.0)


def test_steps_with_prompts_are_timed_but_teach_nothing(fake: FakeTime) -> None:
    clock = StepClock()
    finish(clock, fake, decoding("a"), 1.0)
    mixed = finish(clock, fake, StepRecord("ab", np.array([1, 0]), rows=40), 3.0)
    assert mixed.seconds == pytest.approx(3.0)
    assert mixed.target_seconds == 0.0


def test_a_step_of_nobody_is_a_pause(fake: FakeTime) -> None:
    """vLLM passes such steps on, one a millisecond while a grammar compiles."""
    clock = StepClock()
    finish(clock, fake, decoding("a"), 1.0)
    for _ in range(3):
        empty = finish(clock, fake, StepRecord([], np.zeros(0, dtype=int)), 0.001)
        assert not empty.only_decodes
        assert (empty.seconds, empty.target_seconds) == (0.0, 0.0)
    assert finish(clock, fake, decoding("a"), 1.0).target_seconds == 0.0


def test_fields_of_outcomes_are_arrays_by_themselves() -> None:
    """Whatever rows of the table they come from: a compiled function takes only one kind."""
    table = np.arange(3 * (8 + 2 + 4), dtype=np.float32).reshape(3, -1)
    for rows in (table, table[[2, 0]], table[::2], table[:1]):
        outcomes = Outcomes.from_table(rows, 2)
        assert all(field.flags.c_contiguous for field in outcomes)
        assert {field.dtype for field in outcomes[:8]} == {np.dtype(np.int64)}
        assert outcomes.source.tolist() == rows[:, 0].tolist()
        assert outcomes.tokens_if_truncated.tolist() == rows[:, 8:10].tolist()
        assert outcomes.confidence.tolist() == rows[:, 10:].tolist()


def test_drafts_that_were_not_finite_have_no_confidence() -> None:
    """The device marks them with -1."""
    table = np.concatenate([np.ones((1, COUNTS)), [[0.5, -1.0, -1.0]]], axis=1)
    assert Outcomes.from_table(table).confidence.tolist() == [[0.5, 0.0, 0.0]]
