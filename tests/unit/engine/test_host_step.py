"""V1's step without a model: what is planned, agreed on, handed over and remembered."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from support.configs_by_hand import QWEN
from support.fake_time import FakeTime
from support.planner_world import straight_costs
from vllm_dflash.checkpoint.read import parse_config
from vllm_dflash.config.engine_options import EngineOptions
from vllm_dflash.engine import step_clock
from vllm_dflash.engine.block_layout import BlockInputs
from vllm_dflash.engine.cadence import Cadence
from vllm_dflash.engine.step_clock import StepClock
from vllm_dflash.engine.v1 import host_step
from vllm_dflash.engine.v1.block_forward import BlockDrafts
from vllm_dflash.engine.v1.host_step import FixedLength, HostStep, TargetBatch
from vllm_dflash.planning import Bools, Floats, Ints
from vllm_dflash.planning import step as planning_step
from vllm_dflash.planning.planner import Planner
from vllm_dflash.planning.step import Plan, StepEstimate, StepRecord
from vllm_dflash.planning.texts import NgramIndex

OPTIONS = EngineOptions(32, 7, "adaptive", parse_config("z-lab/it", QWEN))
CONTEXT = 10
"""Tokens of a request's context, before it gets its one token."""
LONGEST, MOST_FREE = 64, 6


class Blocks:
    """Replaces the drafter. Drafts 20, 21, 22 and so on, of which `finite` are finite."""

    reads_newest = False

    def __init__(self, finite: int = 7) -> None:
        self.finite = finite
        self.newest: torch.Tensor | None = None

    def draft(
        self, inputs: BlockInputs, _: torch.Tensor, newest: torch.Tensor | None
    ) -> BlockDrafts:
        self.newest = newest
        lengths = np.diff(inputs.query_start_loc) - 1
        tokens = [[*range(20, 20 + min(length, self.finite))] for length in lengths.tolist()]
        return BlockDrafts(inputs.requests, tokens, np.ones((len(lengths), lengths.max())))


def drafting(*drafted: bool, width: int = 4, **fields: Any) -> Plan:
    return Plan(np.array(drafted), width, utility_per_second=1.0, speedup=2.0, **fields)


class Scripted(FixedLength):
    """Drafts and skips as told, then skips. Verifies at most two drafts of each request."""

    agrees_across_ranks = False

    def __init__(self, *plans: Plan) -> None:
        super().__init__(7)
        self.plans = list(plans)
        self.asked: list[dict[str, Any]] = []
        """What each plan was made from, by name."""
        self.done: list[str] = []
        """What it was asked to do, in order."""

    def plan(self, ids: Sequence[str], context_lens: Ints, max_drafts: Ints, **more: Any) -> Plan:
        self.asked.append({"limits": max_drafts.tolist(), **more})
        self.done.append("plan")
        return self.plans.pop(0) if self.plans else Plan.without_block(len(ids))

    def learn_drafts(self, step: StepRecord) -> None:
        self.done.append("learn")

    def choose(self, step: StepRecord, confidence: Floats) -> tuple[Ints, Bools]:
        assert len(confidence) == step.plan.drafted.sum()
        return np.minimum(step.max_drafts, 2) * step.plan.drafted, np.zeros(step.num_requests, bool)


class FromText(Scripted):
    """Verifies all drafts that texts predict."""

    def choose(self, step: StepRecord, confidence: Floats) -> tuple[Ints, Bools]:
        assert step.predicted is not None
        return step.predicted.lengths, step.predicted.lengths > 0


class Every(Cadence):
    """Plans every so many steps."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps, self.experiments = steps, 0
        self.seen: list[tuple[float, float]] = []

    def interval(self) -> int:
        return self.steps

    def watch(self) -> None:
        self.experiments += 1

    def record_times(self, planning_seconds: float, step_seconds: float) -> None:
        self.seen.append((planning_seconds, step_seconds))


class Host(HostStep):
    """A host step that gets its drafts from `Blocks`."""

    def __init__(
        self, policy: Any = None, *, finite: int = 7, looks_up: bool = False, every: int = 1
    ) -> None:
        stored = SimpleNamespace(store=lambda *rows: None)
        super().__init__(OPTIONS, Blocks(finite), stored, 16)  # type: ignore[arg-type]
        self.planner = policy or self.planner
        self._cadence = Every(every)
        self.all_texts = np.arange(8 * LONGEST, dtype=np.int32).reshape(8, LONGEST)
        if looks_up:
            self.free_drafts = NgramIndex(8)

    def make(
        self,
        *limits: int,
        names: str = "abcdefgh",
        sampled: list[list[int]] | None = None,
        context: int = CONTEXT,
    ) -> tuple[StepRecord, TargetBatch]:
        """Make the next step: a request for each limit, which gets its `sampled` tokens, or one."""
        count = len(limits)
        sampled = sampled or [[1000 + request] for request in range(count)]
        produced = np.array([len(tokens) for tokens in sampled])
        width = max(map(len, sampled))
        padded = np.array([tokens + [-1] * (width - len(tokens)) for tokens in sampled], np.int32)
        step = StepRecord([*names[:count]], produced, rows=count)
        step.context_lens = context + produced - 1
        ends = step.context_lens + 2 + np.array(limits)
        batch = TargetBatch(
            features=torch.zeros(count, 2),
            positions=torch.zeros(count, dtype=torch.int64),
            slots=torch.zeros(count, dtype=torch.int64),
            query_start_loc=np.arange(count + 1),
            num_rejected=np.zeros(count, np.int32),
            block_table=torch.zeros(count, 8, dtype=torch.int32),
            sampled=padded,
            bonus_ids=np.array([tokens[-1] if tokens else 0 for tokens in sampled]),
            texts=self.all_texts,
            text_limits=ends,
            block_limits=ends,
            most_free=MOST_FREE,
        )
        return step, batch

    def step(self, *limits: int, **more: Any) -> tuple[StepRecord, list[list[int]]]:
        """Run a step to its end."""
        step, batch = self.make(*limits, **more)
        drafts = self.run(step, batch)
        self.end(step)
        return step, drafts

    def verify(self, names: str, verified: list[int], produced: list[int]) -> StepRecord:
        """Run a step that verified so many drafts of each request; none can use more drafts."""
        sampled = [[1000 + number for number in range(count)] for count in produced]
        step, batch = self.make(*[0] * len(names), names=names, sampled=sampled)
        step.verified = np.array(verified)
        self.run(step, batch)
        self.end(step)
        return step


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
        ([0, 0, 1], [0, 0, 1]),
        ([2, 4, 0], [2, 4, 0]),
        ([0, 0, 0], [0, 0, 0]),
    ],
)
def test_a_fixed_length_is_always_k_or_what_can_be_used(
    agreed: list[Any], limits: list[int], lengths: list[int]
) -> None:
    """Every rank computes it by itself, so nothing is broadcast."""
    host = Host()
    step, drafts = host.step(*limits)
    assert [len(tokens) for tokens in drafts] == lengths == step.lengths.tolist()
    assert step.plan.drafted.tolist() == [length > 0 for length in lengths]
    assert agreed == []


def test_what_is_measured_is_agreed_upon(agreed: list[Any]) -> None:
    host = Host(Scripted(drafting(False, True)), finite=3)
    step, drafts = host.step(7, 7)
    (plan, (lengths, from_text)) = agreed
    assert plan is step.plan
    assert lengths.tolist() == step.lengths.tolist() == [0, 2]
    assert not from_text.any()
    assert drafts == [[], [20, 21]]
    assert step.nan_drafts == 1  # four were drafted, three can be used
    assert step.any_eligible


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


@pytest.mark.parametrize("limits", [(0, 7, 7), (7, 0, 7), (7, 0, 0)])
def test_drafts_of_a_repeated_plan_are_cut_by_what_their_own_block_promises(
    limits: tuple[int, ...],
) -> None:
    """Some have reached their ends since it was made."""
    planner, sure = Planner(7, 8, straight_costs()), np.array([[0.99], [0.98], [0.01]])
    host = Host(planner, every=9)
    host.block.draft = lambda inputs, *_: BlockDrafts(
        inputs.requests,
        [[1] * 7] * len(inputs.requests),
        np.repeat(sure[inputs.requests], 7, axis=1),
    )
    plan = Plan(np.ones(3, bool), 7, utility_per_second=50.0)
    planner.plan = lambda *_, **__: plan
    host.step(7, 7, 7)
    step, drafts = host.step(*limits)
    assert step.repeats_plan
    good = [7 if limit and request < 2 else 0 for request, limit in enumerate(limits)]
    assert [len(tokens) for tokens in drafts] == good


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


def test_a_fixed_length_follows_no_clock() -> None:
    """Nobody broadcasts it, and clocks of ranks differ. A request whose session goes on can use
    drafts again."""
    host = Host(every=9)
    assert [len(host.step(limit)[1][0]) for limit in (0, 7, 7)] == [0, 7, 7]


def test_the_cadence_is_that_of_planned_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their planning takes 3 ms, and learning what became of drafts 4."""
    clock = FakeTime()
    for module in (step_clock, planning_step):
        monkeypatch.setattr(module, "time", clock)

    class Slow(Scripted):
        def plan(self, *what: Any, **more: Any) -> Plan:
            clock.now += 0.003
            return super().plan(*what, **more)

        def learn_drafts(self, step: StepRecord) -> None:
            clock.now += 0.004

    host = Host(Slow(Plan.without_block(1), Plan.without_block(1, is_probe=True)), every=2)
    for _ in range(4):
        clock.now += 0.01
        host.step(7)
    cadence: Any = host._cadence
    assert np.array(cadence.seen) == pytest.approx(np.array([(0.007, 0.0)] + [(0.007, 0.017)] * 2))


def test_short_steps_are_not_all_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning takes 0.3 ms, and a step 10 ms without it: it may take a hundredth of the time. That
    is so again some steps after an experiment."""
    clock = FakeTime()
    for module in (step_clock, planning_step):
        monkeypatch.setattr(module, "time", clock)

    class Slow(Scripted):
        def plan(self, *what: Any, **more: Any) -> Plan:
            clock.now += 0.0003
            return super().plan(*what, **more)

    host = Host(Slow(*[Plan.without_block(1)] * 25, Plan.without_block(1, is_probe=True)))
    host._cadence = Cadence()
    repeats = []
    for _ in range(130):
        clock.now += 0.01
        repeats.append(host.step(7)[0].repeats_plan)
    assert 0.6 < np.mean(repeats[30:60]) < 0.75
    assert 0.6 < np.mean(repeats[-30:]) < 0.75


def test_the_text_of_a_request_that_has_ended_is_forgotten() -> None:
    host = Host(FromText(), looks_up=True)
    host.step(7, 7, sampled=[[501], [502]])
    assert host.free_drafts is not None
    assert len(host.free_drafts._texts) == 2
    host.begin_step(set(), {next(iter(host.free_drafts._texts))})
    assert len(host.free_drafts._texts) == 1


def test_the_runners_texts_are_only_read() -> None:
    host = Host(FromText(), looks_up=True)
    before = host.all_texts.copy()
    host.step(7, 7, 7, sampled=[[501, 502], [], [503]])
    assert host.all_texts.tolist() == before.tolist()


# --- what was handed over ----------------------------------------------------------------------


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


def test_who_has_ended_is_forgotten_with_all_it_had() -> None:
    host = handed_over()
    host.begin_step(set(), {"a", "b", "c"})
    assert not host._handed_over


# --- the end of a step -------------------------------------------------------------------------


def test_a_step_is_counted_and_learned_from_when_it_ends() -> None:
    """It is compared with the policy's estimate. Planning takes time, too."""
    observed: list[StepRecord] = []

    class Learning(Scripted):
        def record_step(self, step: StepRecord) -> StepEstimate:  # type: ignore[override]
            observed.append(step)
            return StepEstimate(0.002, 0.0, 0.0, plain_seconds=0.001)

    host = Host(Learning())
    step, _ = host.make(7, 7)
    step.target_seconds = 0.004
    host.end(step)
    assert observed == [step]
    assert step.planning_seconds > 0
    assert host.statistics.planning_seconds == step.planning_seconds
    assert host.statistics.to_dict()["costs_ms"]["step"] == {"estimated": 2.0, "measured": 4.0}


@pytest.mark.parametrize(
    ("every", "verified", "is_held"), [(4, 0, True), (4, 2, False), (1, 0, False)]
)
def test_undrafted_steps_are_timed_together_while_nobody_is_asked(
    monkeypatch: pytest.MonkeyPatch, every: int, verified: int, is_held: bool
) -> None:
    """Except for a step that verified drafts, which is unlike the others."""
    held: list[bool] = []
    monkeypatch.setattr(StepClock, "finish", lambda _, step, *, hold: held.append(hold))
    host = Host(Scripted(Plan.without_block(1)), every=every)
    step, batch = host.make(7)
    host.run(step, batch)
    step.verified = np.array([verified])
    host.end(step)
    assert held == [is_held]


def test_logits_that_were_not_finite_are_counted_by_request() -> None:
    """Compared with the drafts of each request, which its own limit may have cut."""
    host = Host(Scripted(drafting(True, True, False, True, width=5)), finite=1)
    step, drafts = host.step(7, 3, 2, 7)
    assert drafts == [[20], [20], [], [20]]
    assert step.nan_drafts == 4 + 2 + 4
    assert step.max_drafts.tolist() == [1, 1, 0, 1]
