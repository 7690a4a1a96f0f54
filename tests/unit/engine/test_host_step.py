"""V1's step without a model: what is planned, agreed on, handed over and remembered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from support.configs_by_hand import QWEN
from vllm_dflash.checkpoint.read import parse_config
from vllm_dflash.config.engine_options import EngineOptions
from vllm_dflash.engine.block_layout import BlockInputs
from vllm_dflash.engine.step_clock import StepClock
from vllm_dflash.engine.v1 import host_step
from vllm_dflash.engine.v1.block_forward import BlockDrafts
from vllm_dflash.engine.v1.host_step import FixedLength, HostStep, TargetBatch
from vllm_dflash.planning import Bools, Floats, Ints
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


def drafting(*drafted: bool, width: int = 4, holds_for: int = 0) -> Plan:
    return Plan(np.array(drafted), width, price=1.0, speedup=2.0, holds_for=holds_for)


class Scripted(FixedLength):
    """Drafts and skips as told, then skips. Verifies at most two drafts of each request."""

    agrees_across_ranks = False

    def __init__(self, *plans: Plan) -> None:
        super().__init__(7)
        self.plans = list(plans)
        self.asked: list[StepRecord] = []

    def plan(self, step: StepRecord) -> Plan:
        self.asked.append(step)
        return self.plans.pop(0) if self.plans else Plan.without_block(step.num_requests)

    def decide_lengths(self, step: StepRecord, confidence: Floats) -> tuple[Ints, Bools]:
        return np.minimum(step.limits, 2) * step.plan.drafted, np.zeros(step.num_requests, bool)


class FromText(Scripted):
    """Verifies all drafts that texts predict."""

    def decide_lengths(self, step: StepRecord, confidence: Floats) -> tuple[Ints, Bools]:
        assert step.predicted is not None
        return step.predicted.lengths, step.predicted.lengths > 0


class Host(HostStep):
    """A host step that gets its drafts from `Blocks`."""

    def __init__(self, policy: Any = None, *, finite: int = 7, looks_up: bool = False) -> None:
        stored = SimpleNamespace(store=lambda *rows: None)
        super().__init__(OPTIONS, Blocks(finite), stored, 16)  # type: ignore[arg-type]
        self.planner = policy or self.planner
        self.all_texts = np.arange(8 * LONGEST, dtype=np.int32).reshape(8, LONGEST)
        if looks_up:
            self.free_drafts = NgramIndex(8, LONGEST, MOST_FREE)

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
    assert step.could_draft


def test_ranks_take_the_drafts_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(FromText(Plan.without_block(2, uses_text=True)), looks_up=True)
    host.all_texts[:2, :CONTEXT] = [7, 1000, 8, 9, 3, 4, 5, 6, 1, 7]
    of_rank_0 = iter([drafting(True, False), (np.array([1, 2]), np.array([False, True]))])
    monkeypatch.setattr(host_step, "from_rank_0", lambda _: next(of_rank_0))
    step, batch = host.make(7, 7, sampled=[[1000], [1000]])
    step.predicted = None
    assert host.run(step, batch) == [[20], [8, 9]]


@pytest.mark.parametrize(
    ("plan", "batches", "rests"),
    [
        (Plan.without_block(2, holds_for=2), [(7, 0)] * 4, [False, True, True, False]),
        (Plan.without_block(2, holds_for=5), [(7, 7), (7,), (7, 7)], [False] * 3),
        (Plan.without_block(1, holds_for=1), [(0,)] * 2, [False, True]),
        (drafting(True, holds_for=3), [(7,)] * 2, [False] * 2),
    ],
    ids=["skipped", "until the batch changes", "nobody could draft", "not after a block"],
)
def test_steps_rest_while_a_plan_without_blocks_holds(
    plan: Plan, batches: list[tuple[int, ...]], rests: list[bool]
) -> None:
    """They are not planned. Steps in which somebody could have drafted are counted as skipped."""
    host = Host(policy := Scripted(plan))
    steps = [host.step(*limits)[0] for limits in batches]
    assert [step.is_resting for step in steps] == rests
    assert len(policy.asked) == rests.count(False)
    assert [step.could_draft for step in steps] == [any(limits) for limits in batches]
    assert steps[1].plan.drafted.tolist() == [False] * len(batches[1])
    assert host.statistics.steps == len(batches)
    assert host.statistics.skipped_steps == sum(map(any, batches)) - plan.drafted.any()


def test_a_step_that_rests_may_take_what_its_text_predicts() -> None:
    """It uses up no other resting step, and starts no new rest."""
    first = Plan.without_block(2, holds_for=2)
    free = Plan.without_block(2, holds_for=9, uses_text=True)
    host = Host(policy := FromText(first, free, first), looks_up=True)
    host.all_texts[1, : CONTEXT - 1] = [7, 1000, 8, 9, 3, 4, 5, 6, 1]
    host.step(7, 0, sampled=[[4], [7]], context=CONTEXT - 1)
    step, drafts = host.step(0, 3, sampled=[[5], [1000]])
    assert step.is_resting
    assert step.plan is free
    assert step.could_draft  # like the planned step, whose limits are known
    assert drafts == [[], [8, 9, 3]]
    assert step.from_text.tolist() == [False, True]
    assert step.nan_drafts == 0
    assert host.statistics.skipped_steps == 2
    assert len(policy.asked) == 2
    # The next step, which is the last that rests, looks at what became of it.
    following = [host.step(7, 0, context=CONTEXT + more)[0] for more in (1, 2)]
    assert [step.is_resting for step in following] == [True, False]


def test_tokens_are_written_where_the_runner_will_write_them() -> None:
    """Only tokens are written."""
    host = Host(FromText(), looks_up=True)
    before = host.all_texts.copy()
    host.step(7, 7, 7, sampled=[[501, 502], [], [503]])
    before[0, CONTEXT : CONTEXT + 2] = [501, 502]
    before[2, CONTEXT] = 503
    assert host.all_texts.tolist() == before.tolist()


@pytest.mark.parametrize(
    ("block", "agreed_on"),
    [([8, 9, 3, 4], 4), ([8, 9, 0, 4], 2), ([0, 9, 3, 4], 0), ([8], 1), ([], 0)],
)
def test_how_far_a_block_says_what_the_text_does(block: list[int], agreed_on: int) -> None:
    """The first has a text and no block, the second a block and no text, the third neither."""
    drafted = np.array([False, True, False, True])
    host = Host(FromText(Plan(drafted, 4, 1.0, 1.0, uses_text=True)), looks_up=True)
    blocks = BlockDrafts(np.array([1, 3]), [[8, 9, 3, 4], block], np.ones((2, 4)))
    drafter = SimpleNamespace(draft=lambda *_: blocks, reads_newest=False)
    host.block = drafter  # type: ignore[assignment]
    host.all_texts[[0, 3], :CONTEXT] = [7, 1000, 8, 9, 3, 4, 5, 6, 1, 7]
    step, _ = host.step(7, 7, 7, 7, sampled=[[1000], [1], [1], [1000]])
    assert step.predicted is not None
    assert step.predicted.lengths.tolist() == [MOST_FREE, 0, 0, MOST_FREE]
    assert step.agreed.tolist() == [0, 0, 0, agreed_on]


# --- what was handed over ----------------------------------------------------------------------


def counted(host: Host) -> tuple[int, int, int]:
    found = host.statistics
    return found.verifications, found.draft_tokens, found.accepted_tokens


def handed_over(*from_text: bool, lengths: tuple[int, ...] = (2, 2, 2)) -> Host:
    """Hand over drafts of these lengths, by default for three requests. `from_text`: which of them
    come from a text."""
    count = len(lengths)

    class Told(Scripted):
        def decide_lengths(self, step: StepRecord, confidence: Floats) -> tuple[Ints, Bools]:
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
        def observe(self, step: StepRecord) -> StepEstimate:  # type: ignore[override]
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
    ("holds_for", "verified", "is_held"), [(3, 0, True), (3, 2, False), (0, 0, False)]
)
def test_undrafted_steps_are_timed_together_while_nobody_is_asked(
    monkeypatch: pytest.MonkeyPatch, holds_for: int, verified: int, is_held: bool
) -> None:
    """Except for a step that verified drafts, which is unlike the others."""
    held: list[bool] = []
    monkeypatch.setattr(StepClock, "finish", lambda _, step, *, hold: held.append(hold))
    host = Host(Scripted(Plan.without_block(1, holds_for=holds_for)))
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
    assert step.limits.tolist() == [1, 1, 0, 1]
