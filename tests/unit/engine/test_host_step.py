"""V1's step without a model: what is planned, agreed on, repeated, learned from and verified."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from support.fake_time import FakeTime
from support.scripted_host import CONTEXT, FromText, Host, Scripted, drafting
from vllm_dflash.engine.v1 import host_step
from vllm_dflash.planning import Bools, Floats, Ints
from vllm_dflash.planning import step as planning_step
from vllm_dflash.planning.step import Plan, StepRecord


@pytest.fixture(autouse=True)
def agreed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Values that rank 0 sent to the others, one for each broadcast."""
    sent: list[Any] = []
    monkeypatch.setattr(host_step, "from_rank_0", lambda value: sent.append(value) or value)
    return sent


def test_the_newest_context_of_those_who_are_drafted() -> None:
    """The last row that was not rejected, if the drafter reads it; otherwise none is looked up."""
    for reads_newest in (False, True):
        host = Host(Scripted(drafting(True, False, True, width=4)))
        blocks: Any = host.block
        blocks.reads_newest = reads_newest
        step, batch = host.make(9, 9, 9)
        batch = batch._replace(
            features=torch.arange(9.0)[:, None],
            positions=torch.zeros(9, dtype=torch.int64),
            slots=torch.zeros(9, dtype=torch.int64),
            query_start_loc=np.array([0, 4, 5, 9]),
            num_rejected=np.array([2, 0, 1], np.int32),
        )
        host.run(step, batch)
        expected = torch.tensor([[1.0], [7.0]]) if reads_newest else None
        torch.testing.assert_close(blocks.newest, expected)


@pytest.mark.parametrize(
    ("limits", "lengths"),
    [
        ([9, 0, 3], [7, 0, 3]),
        ([2, 4, 0], [2, 4, 0]),
        ([0, 0, 0], [0, 0, 0]),
    ],
)
def test_a_fixed_length_is_always_k_or_what_can_be_used(
    agreed: list[Any], limits: list[int], lengths: list[int]
) -> None:
    """Every rank computes it by itself, so nothing is broadcast."""
    host = Host(every=9)
    for _ in range(2):  # a plan is not repeated, because clocks of ranks differ
        step, drafts = host.step(*limits)
        assert [len(tokens) for tokens in drafts] == lengths == step.lengths.tolist()
        assert step.plan.drafted.tolist() == [length > 0 for length in lengths]
        limits, lengths = limits[::-1], lengths[::-1]
    assert agreed == []


def test_ranks_take_the_drafts_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(FromText(Plan.without_block(2)), looks_up=True)
    host.all_texts[:2, :CONTEXT] = [7, 1000, 8, 9, 3, 4, 5, 6, 1, 7]
    of_rank_0 = iter([drafting(True, False), (np.array([1, 2]), np.array([False, True]))])
    monkeypatch.setattr(host_step, "from_rank_0", lambda _: next(of_rank_0))
    step, batch = host.make(7, 7, sampled=[[1000], [1000]])
    step.predicted = None
    assert host.run(step, batch) == [[20], [8, 9]]


# --- plans that are repeated ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "batches", "repeats"),
    [
        (Plan.without_block(2), [(7, 0)] * 4, [False, True, True, False]),
        (drafting(True, False), [(7, 7)] * 4, [False, True, True, False]),
        (Plan.without_block(2), [(7, 7), (7,), (7, 7)], [False] * 3),
        (Plan.without_block(1), [(0,)] * 2, [False, True]),
        (drafting(True, is_probe=True), [(7,)] * 2, [False] * 2),
        (Plan.without_block(1, is_probe=True), [(7,)] * 2, [False] * 2),
    ],
    ids=["skipped", "drafted", "until the batch changes", "nobody could", "a probe", "a plain one"],
)
def test_a_plan_also_applies_to_the_next_steps(
    plan: Plan, batches: list[tuple[int, ...]], repeats: list[bool]
) -> None:
    """These are not planned. Steps in which somebody could have drafted are counted as skipped."""
    host = Host(policy := Scripted(plan), every=3)
    steps = [host.step(*limits)[0] for limits in batches]
    assert [step.repeats_plan for step in steps] == repeats
    assert len(policy.asked) == repeats.count(False)
    assert [step.any_eligible for step in steps] == [any(limits) for limits in batches]
    drafted = [bool(step.plan.drafted.any()) for step in steps]
    assert drafted == [plan.width > 0] + [plan.width > 0 and again for again in repeats[1:]]
    assert host.statistics.steps == len(batches)
    assert host.statistics.skipped_steps == sum(map(any, batches)) - sum(drafted)


def test_a_plan_made_while_a_request_is_in_its_prompt_is_not_repeated() -> None:
    """Another request can be drafted with the next step."""
    host = Host(Scripted(drafting(False, True)), every=3)
    steps = [host.step(7, 7, sampled=tokens)[0] for tokens in ([[], [1]], [[2], [3]], [[4], [5]])]
    assert [step.repeats_plan for step in steps] == [False, False, True]


def test_a_repeated_plan_drafts_within_the_limits_of_its_own_step() -> None:
    """The third request has no block, the second reaches its end. Drafts are cut anew."""

    class All(Scripted):
        def choose(self, step: StepRecord, confidence: Floats) -> tuple[Ints, Bools]:
            assert confidence.shape == (step.plan.drafted.sum(), step.max_drafts.max())
            return step.max_drafts * step.plan.drafted, np.zeros(step.num_requests, bool)

    plan = drafting(True, True, False, width=5)
    host = Host(policy := All(plan), every=9)
    found = [host.step(*limits) for limits in ((7, 7, 7), (3, 2, 7), (1, 0, 7))]
    assert [[len(tokens) for tokens in drafts] for _, drafts in found] == [
        [5, 5, 0],
        [3, 2, 0],
        [1, 0, 0],
    ]
    assert len(policy.asked) == 1
    assert [step.repeats_plan for step, _ in found] == [False, True, True]
    assert [step.plan.drafted.tolist() for step, _ in found] == [[True, True, False]] * 2 + [
        [True, False, False]
    ]
    assert [step.draft_rows for step, _ in found] == [12, 7, 2]


def test_a_plan_none_of_whose_requests_can_use_drafts_is_made_anew() -> None:
    """Others can use some. Before that, it is learned what became of drafts."""
    host = Host(policy := Scripted(drafting(True, False), drafting(False, True)), every=3)
    batches = (7, 7), (0, 7), (0, 7), (0, 7), (0, 7)
    steps = [host.step(*limits)[0] for limits in batches]
    assert [step.repeats_plan for step in steps] == [False, False, True, True, False]
    assert [one["limits"] for one in policy.asked] == [[7, 7], [0, 7], [0, 7]]
    assert steps[2].plan.drafted.tolist() == [False, True]
    assert policy.done == ["learn", "plan"] * 3


def test_free_drafts_are_considered_while_a_plan_without_blocks_is_repeated() -> None:
    """They cost no step that repeats the plan, and start no new plan."""
    host = Host(policy := FromText(Plan.without_block(2)), looks_up=True, every=3)
    host.all_texts[1, : CONTEXT - 1] = [7, 1000, 8, 9, 3, 4, 5, 6, 1]
    host.step(7, 0, sampled=[[4], [7]], context=CONTEXT - 1)
    step, drafts = host.step(0, 3, sampled=[[5], [1000]])
    assert step.repeats_plan
    assert step.any_eligible  # like the planned step, whose limits are known
    assert drafts == [[], [8, 9, 3]]
    assert step.from_text.tolist() == [False, True]
    assert step.nan_drafts == 0
    assert host.statistics.skipped_steps == 2
    assert len(policy.asked) == 1
    # The next step, which is the last that repeats it, looks at what became of them.
    following = [host.step(7, 0, context=CONTEXT + more)[0] for more in (1, 2)]
    assert [step.repeats_plan for step in following] == [True, False]
    assert following[0].predicted is not None
    assert following[0].predicted.num_observed.tolist() == [0, 1]


def test_a_match_that_did_not_pay_is_not_weighed_again_before_the_next_plan() -> None:
    """A longer one is, and so is the same one under a new plan."""
    weighed: list[int] = []

    class Useless(Scripted):
        def choose(self, step: StepRecord, confidence: Floats) -> tuple[Ints, Bools]:
            assert step.predicted is not None
            weighed.append(step.predicted.longest_match)
            return np.zeros(1, np.int64), np.zeros(1, bool)

    host = Host(Useless(Plan.without_block(1)), looks_up=True, every=5)
    host.all_texts[0, :CONTEXT] = [1, 2, 3, 4, 5, 9, 2, 3, 8, 1]
    matches = []
    for more, token in enumerate([2, 3, 9, 2, 3, 9]):
        step, drafts = host.step(7, sampled=[[token]], context=CONTEXT + more)
        assert drafts == [[]]
        matches.append(0 if step.predicted is None else step.predicted.longest_match)
        host.all_texts[0, CONTEXT + more] = token
    assert (matches, weighed) == ([2, 3, 0, 2, 3, 3], [2, 3, 3])


def test_what_became_of_drafts_is_learned_before_a_step_is_planned() -> None:
    """Not in steps that repeat a plan: what they verified is of the same kind. A plan is told how
    many steps there were since the last one."""
    host = Host(policy := Scripted(), every=3)
    for _ in range(4):
        host.step(7)
    assert policy.done == ["learn", "plan"] * 2
    host.step(7, 7)
    assert policy.done == ["learn", "plan"] * 3
    assert [one["steps"] for one in policy.asked] == [1, 3, 1]


def test_how_long_a_plan_holds_is_agreed_upon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks plan in the same steps, whatever their own clocks say."""
    of_rank_0 = Plan.without_block(1, holds_for=1)
    monkeypatch.setattr(host_step, "from_rank_0", lambda _: of_rank_0)
    for every in (1, 9):
        host = Host(Scripted(), every=every)
        steps = [host.step(7)[0] for _ in range(4)]
        assert [step.repeats_plan for step in steps] == [False, True, False, True]


def test_the_text_of_a_request_that_has_ended_is_forgotten() -> None:
    host = Host(FromText(), looks_up=True)
    host.step(7, 7, sampled=[[501], [502]])
    assert host.free_drafts is not None
    assert len(host.free_drafts._texts) == 2
    host.begin_step(set(), {next(iter(host.free_drafts._texts))})
    assert len(host.free_drafts._texts) == 1


def test_steps_are_counted_and_new_plans_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan takes 2 ms, of which its own step is charged half, because it holds for two steps;
    learning from a step takes 1 ms."""
    clock, observed, cadence = FakeTime(), list[StepRecord](), list[tuple[float, float]]()
    monkeypatch.setattr(planning_step, "time", clock)

    class Learning(Scripted):
        def plan(self, *what: Any, **more: Any) -> Plan:
            clock.now += 0.002
            return super().plan(*what, **more)

        def choose(self, step: StepRecord, confidence: Floats) -> tuple[Ints, Bools]:
            clock.now += 0.5
            return super().choose(step, confidence)

        def record_step(self, step: StepRecord) -> None:
            clock.now += 0.001
            observed.append(step)

    host = Host(Learning(drafting(True, True), drafting(True, True)), every=2)
    monkeypatch.setattr(host._cadence, "record_step", lambda *each: cadence.append(each))
    steps = []
    for _ in range(3):
        step, batch = host.make(7, 7)
        host.run(step, batch)
        step.target_seconds = 0.004
        host._clock.finish = lambda step: None
        host.end(step)
        steps.append(step)
    assert observed == steps[::2]
    assert host.statistics.planning_seconds == pytest.approx(2 * (0.002 + 0.001) + 3 * 0.5)
    assert host.statistics.steps == 3
    assert [step.target_seconds for step in steps] == pytest.approx([0.003, 0.004, 0.003])
    assert [each[0] for each in cadence] == pytest.approx([0.002 + 0.001] * 2)


def test_rows_that_were_stored_are_those_of_the_step_and_those_that_waited() -> None:
    """Some rows are stored to make space for others, and some because a request is drafted."""
    planner = Scripted(drafting(True, False))
    host = Host(planner)
    backlog: Any = SimpleNamespace(
        add=lambda *_: 3, count=lambda *_: np.array([5, 9]), store=lambda *_: 5
    )
    host.backlog = backlog
    step, _ = host.step(7, 7)
    assert step.context_rows == 3 + 5
    assert planner.asked[0]["waiting"].tolist() == [5, 9]


def test_logits_that_were_not_finite_are_counted_by_request() -> None:
    """Compared with the drafts of each request, which its own limit may have cut."""
    host = Host(Scripted(drafting(True, True, False, True, width=5)), finite=1)
    step, drafts = host.step(7, 3, 2, 7)
    assert drafts == [[20], [20], [], [20]]
    assert step.nan_drafts == 4 + 2 + 4
    assert step.max_drafts.tolist() == [1, 1, 0, 1]


# --- drafts that were handed over -----------------------------------------------------------------


def counted(host: Host) -> tuple[int, int, int]:
    found = host.statistics
    return found.verifications, found.draft_tokens, found.accepted_tokens


def handed_over(*from_text: bool, lengths: tuple[int, ...] = (2, 2, 2)) -> Host:
    """Hand over drafts of these lengths, by default for three requests. `from_text`: which of them
    come from a text."""
    count = len(lengths)

    class Told(Scripted):
        def choose(self, step: StepRecord, confidence: Floats) -> tuple[Ints, Bools]:
            return np.array(lengths), np.array(from_text or [False] * count)

    host = Host(Told(drafting(*[True] * count)), looks_up=True)
    host.step(*[7] * count)
    return host


@pytest.mark.parametrize(
    ("admitted", "ended", "expected"),
    [
        (set(), set(), (2, 4, 1)),
        ({"b"}, {"of another batch"}, (1, 2, 1)),
        (set(), {"a"}, (1, 2, 0)),
        ({"a", "b", "elsewhere"}, set(), (0, 0, 0)),
    ],
)
def test_placeholders_are_no_drafts(
    admitted: set[str], ended: set[str], expected: tuple[int, int, int]
) -> None:
    """They go to a request that comes back, or whose name another request has by now. All drafts of
    the second request were rejected; the third had none in this step."""
    host = handed_over()
    host.begin_step(admitted, ended)
    host.verify("abc", [2, 2, 0], [2, 1, 1])
    assert counted(host) == expected


def test_drafts_of_a_request_that_was_given_none_are_vllms() -> None:
    host = handed_over()
    step = host.verify("abd", [2, 2, 7], [1, 1, 1])
    assert step.verified.tolist() == [2, 2, 0]


def test_a_sample_that_is_discarded_says_nothing() -> None:
    host = handed_over()
    assert host.verify("abc", [2, 2, 2], [1, 0, 3]).verified.tolist() == [2, 0, 2]


def test_free_drafts_are_known_until_they_are_verified() -> None:
    """They are known by name: the batch may be another one, and a request may have to wait. The
    second request was given none."""
    host = handed_over(False, False, True, True, lengths=(2, 0, 2, 2))
    host.verify("xy", [0, 0], [1, 1])
    step = host.verify("ca", [2, 2], [3, 2])
    assert step.verified_free.tolist() == [2, 0]
    assert counted(host) == (2, 4, 3)
    found = host.statistics
    assert (found.free_verifications, found.free_draft_tokens) == (1, 2)
    assert found.free_accepted_tokens == 2
    assert host.verify("cab", [2, 2, 2], [3, 2, 1]).verified.tolist() == [0, 0, 0]
    assert host.verify("d", [1], [1]).verified_free.tolist() == [1]
