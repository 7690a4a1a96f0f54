"""V2's schedulers: what they plan for a step, and what goes with it."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds

from support.bare_scheduler import (
    MAX_LEN,
    bare,
    plan_always,
    request,
    schedule,
    step,
    take_vllm_out,
)
from support.planner_world import straight_costs
from vllm_dflash.config.engine_options import EngineOptions
from vllm_dflash.engine.cadence import Cadence
from vllm_dflash.engine.v2 import v2_scheduler
from vllm_dflash.engine.v2.exchange import CHAINS_ONLY, StepPlan, plan_of
from vllm_dflash.engine.v2.v2_scheduler import V2AsyncScheduler, V2Scheduler
from vllm_dflash.planning.planner import Planner


def num_slots(scheduler: Any, *names: str) -> int:
    """Return the number of drafts that vLLM has room for after a step of these requests."""
    slots: int = schedule(scheduler, *names).num_spec_tokens_to_schedule
    return slots


def test_without_a_planner_a_step_with_room_for_drafts_runs_a_block() -> None:
    """As from a user's scheduler. Workers report, since nobody says that they need not."""
    scheduled = SchedulerOutput.make_empty()
    for slots in (0, 1, 7):
        scheduled.num_spec_tokens_to_schedule = slots
        assert plan_of(scheduled) == StepPlan(runs_block=slots > 0, length=slots, reports=True)


def test_before_anything_is_known_every_step_drafts_to_the_full(scheduler: Any) -> None:
    scheduled = schedule(scheduler, *map(str, range(64)))
    assert scheduled.num_spec_tokens_to_schedule == 7
    assert plan_of(scheduled) == StepPlan(runs_block=True, length=7)


@pytest.mark.parametrize(
    ("lengths", "runs_block", "expected"),
    [
        ((3, 0, 3, 1), True, StepPlan(True, 3, {"a": 3, "b": 0, "c": 3, "d": 1})),
        ((3, 0, 3, 1), False, StepPlan(False, 3, {"a": 3, "b": 0, "c": 3, "d": 1})),
        ((2, 2, 2, 2), True, StepPlan(True, 2)),
        ((0, 0, 0, 0), True, StepPlan(False, 0)),  # nobody has room
    ],
)
def test_the_plan_goes_with_the_step(
    scheduler: Any,
    monkeypatch: pytest.MonkeyPatch,
    lengths: tuple[int, ...],
    runs_block: bool,
    expected: StepPlan,
) -> None:
    """It says whether a block runs; vLLM has room for the most drafts of any request."""
    plan_always(monkeypatch, *lengths, runs_block=runs_block)
    scheduled = schedule(scheduler, *"abcd")
    assert scheduled.num_spec_tokens_to_schedule == max(lengths)
    assert plan_of(scheduled) == expected


def test_trees_get_room_where_they_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """All there is if nothing is planned; a chain's without a block, where larger trees bring less
    than their rows take, or if a worker says that all drafts are chains."""
    scheduler = bare(monkeypatch, tree_nodes=31)
    scheduler.requests = {"a": request()}
    assert num_slots(scheduler, "a") == 31
    worth = {"rate": 240.0, "of_blocks": float(np.log(1 + 3))}
    scheduler.planner.start(straight_costs(), [0, 3, 7, 15, 31], ragged_seconds=1.0)
    plan_always(monkeypatch, 3, **worth)
    assert num_slots(scheduler, "a") == 3
    scheduler._trees.gain._chains[:], scheduler._trees.gain._trees[:] = 1e6, [1e6, 1e6, 9e6]
    assert num_slots(scheduler, "a") == 31
    scheduler.planner.start(scheduler.planner.costs, [0, 3, 7, 15], ragged_seconds=1.0)
    assert num_slots(scheduler, "a") < 31  # it has no graph
    plan_always(monkeypatch, 3, runs_block=False, **worth)
    assert num_slots(scheduler, "a") == 3
    plan_always(monkeypatch, 3, **worth)
    scheduled, output = step({"a": 0}, {"a": 1})
    CHAINS_ONLY.attach(output, True)
    scheduler.update_from_output(scheduled, output)
    assert num_slots(scheduler, "a") == 3


@pytest.mark.parametrize("kept", [7, 0], ids=["0.32", "0.33"])
def test_trees_leave_room_for_the_blocks_of_all_requests(
    monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """vLLM 0.32 subtracts a block's tokens from a step for each request. It would count a tree's
    nodes twice, and leave out the requests that come last."""
    take_vllm_out(monkeypatch, tree_nodes=31)
    config = Scheduler.vllm_config
    config.speculative_config.max_num_new_slots_for_drafting = kept
    for rows, slots in ((1 + 31, 31), (1 + 20, 20), (1 + 7, 7)):
        config.scheduler_config.max_num_batched_tokens = 16 * (rows + kept)
        scheduler: Any = V2AsyncScheduler()
        assert scheduler.vllm_config.speculative_config.num_speculative_tokens == 7
        assert scheduler.num_spec_tokens == 31
        scheduler.requests = {str(number): request() for number in range(16)}
        assert num_slots(scheduler, *scheduler.requests) == slots


@pytest.mark.parametrize(
    ("of_vllm", "asked", "active"),
    [
        (256, None, 1024),  # vLLM 0.33 makes room for blocks of 31
        (100, 100, 100),
        (256, 600, 600),
    ],
)
def test_as_many_requests_are_let_in_as_have_room_for_blocks(
    monkeypatch: pytest.MonkeyPatch, of_vllm: int, asked: int | None, active: int
) -> None:
    """Blocks have 8 rows and trees 32; there are up to 1024 requests, in steps of 8192 rows."""
    take_vllm_out(monkeypatch, tree_nodes=31)
    monkeypatch.setattr(EngineOptions.from_config(Scheduler.vllm_config), "most_active", asked)
    monkeypatch.setattr(Scheduler, "max_num_active_reqs", of_vllm)
    Scheduler.vllm_config.scheduler_config.max_num_seqs = 1024
    assert V2AsyncScheduler().max_num_active_reqs == active


def test_each_request_has_its_own_number_of_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five requests, in the step's own order. An inner one gets none, one is in its prompt, one is
    at its limit, and one was just admitted."""
    scheduler = bare(monkeypatch)
    requests = {name: request(number, draft_slots=5) for number, name in enumerate("abwn", 100)}
    requests["p"] = request(200)  # in its prompt: vLLM gives it no placeholders
    requests["e"] = request(MAX_LEN - 4, draft_slots=5)
    scheduler.requests = requests
    asked = plan_always(monkeypatch, 1, 3, 0, 5, 4)
    scheduled, _ = step(dict.fromkeys("enbpa", 0), {}, {"e": 1, "n": 1, "b": 6, "p": 30, "a": 2})
    scheduler._update_after_schedule(scheduled)
    drafts = {name: len(one.spec_token_ids) for name, one in requests.items()}
    assert drafts == {"a": 4, "b": 0, "w": 5, "n": 3, "p": 0, "e": 1}
    ((names, context, limits),) = asked
    assert names == [*"enbpa"]
    assert context.tolist() == [MAX_LEN - 3, 104, 107, 230, 102]
    assert limits.tolist() == [1, 7, 7, 7, 7]


@pytest.mark.parametrize(("of_drafter", "of_target"), [(110, MAX_LEN), (MAX_LEN, 110)])
def test_nobody_is_drafted_past_the_shorter_of_both_models_limits(
    monkeypatch: pytest.MonkeyPatch, of_drafter: int, of_target: int
) -> None:
    """Drafts that fit after this much context, including this step's token."""
    take_vllm_out(monkeypatch)
    monkeypatch.setattr(v2_scheduler, "drafted_length", lambda _: of_drafter)
    monkeypatch.setattr(Scheduler, "max_model_len", of_target)
    contexts = {"a": 50, "b": 100, "c": 104, "d": 107, "e": 200}
    scheduler: Any = V2AsyncScheduler()
    scheduler.requests = {name: request(context) for name, context in contexts.items()}
    asked = plan_always(monkeypatch, *[0] * 5)
    schedule(scheduler, *contexts)
    ((_, _, limits),) = asked
    assert limits.tolist() == [7, 7, 3, 0, 0]


IN_PROMPT = SimpleNamespace(**{**vars(request()), "num_tokens": 200})


@pytest.mark.parametrize(
    ("requests", "is_planned"),
    [
        ([request(left=2), IN_PROMPT], False),  # two tokens to come, with no draft before them
        ([request(left=2), request(left=3), request(left=2)], True),
    ],
)
def test_nothing_is_drafted_that_nobody_could_use(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch, requests: list[Any], is_planned: bool
) -> None:
    scheduler.planner.start(straight_costs(), range(8))
    scheduler.requests = {str(number): each for number, each in enumerate(requests)}
    asked = plan_always(monkeypatch, *[7] * len(requests))
    scheduled = schedule(scheduler, *scheduler.requests)
    plan = plan_of(scheduled)
    assert (bool(asked), plan.runs_block, plan.any_eligible) == (is_planned,) * 3
    assert scheduler.statistics.skipped_steps == 0
    assert scheduled.num_spec_tokens_to_schedule == 7 * is_planned


def test_drafts_that_come_with_the_tokens_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """If scheduling waits for them. The worker's batch has an order of its own."""
    scheduler = bare(monkeypatch, V2Scheduler)
    scheduler.requests = {name: request() for name in "cab"}

    def take(scheduler: Any, drafts: DraftTokenIds) -> None:
        for name, tokens in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
            scheduler.requests[name].spec_token_ids = tokens

    monkeypatch.setattr(Scheduler, "update_draft_token_ids", take)
    drafts = DraftTokenIds(["c", "a", "b"], [[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    for lengths, taken in (
        ((3, 0, 2), [[1, 2], [4, 5, 6], []]),
        ((3, 3, 3), [[1, 2, 3], [4, 5, 6], [7, 8, 9]]),
    ):
        plan_always(monkeypatch, *lengths)
        schedule(scheduler, *"abc")
        scheduler.update_draft_token_ids(drafts)
        assert [each.spec_token_ids for each in scheduler.requests.values()] == taken


def test_what_was_counted_is_told_now_and_then(scheduler: Any) -> None:
    """Also where lengths are fixed."""
    told = []
    for number in range(100):
        counted = plan_of(schedule(scheduler, "a")).counted
        scheduler.statistics.probes = number
        if counted is None:
            continue
        told.append(number)
        assert counted["probes"] == number - 1
    assert told == [31, 63, 95]


def test_steps_behind_which_vllm_drafts_nothing(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.33 does so if requests are in their prompts or at their ends. Nothing is planned."""
    monkeypatch.setattr(Planner, "plan", lambda *_, **__: pytest.fail("asked"))
    scheduled, _ = step({"a": 0, "b": 0}, {}, {"a": 60, "b": 1}, next_drafts=7)
    scheduled.skip_drafts = True
    scheduler._update_after_schedule(scheduled)
    assert scheduled.num_spec_tokens_to_schedule == 0
    assert not plan_of(scheduled).runs_block
    counted = scheduler.statistics
    assert (counted.steps, counted.drafted_steps, counted.skipped_steps) == (1, 0, 0)


# --- plans that are repeated ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "runs_block", "drops_drafts", "reports"),
    [
        ((3, 3), True, False, [True, False, False]),
        ((3, 0), False, False, [True, True, True]),  # of texts: who had any is not known
        ((3, 3), True, True, [True, True, True]),  # vLLM's adaptive verification
    ],
)
def test_reports_are_asked_for_where_they_are_needed(
    monkeypatch: pytest.MonkeyPatch,
    lengths: tuple[int, ...],
    runs_block: bool,
    drops_drafts: bool,
    reports: list[bool],
) -> None:
    """New plans need them, and steps that verify drafts whose number the host does not know."""
    scheduler = bare(monkeypatch, plans_every_step=False, drops_drafts=drops_drafts)
    due = [True, False, False]
    monkeypatch.setattr(Cadence, "is_due", lambda *_: due.pop(0))
    plan_always(monkeypatch, *lengths, runs_block=runs_block)
    plans = [plan_of(schedule(scheduler, *"ab")) for _ in reports]
    assert [plan.is_new for plan in plans] == [True, False, False]
    assert [plan.reports for plan in plans] == reports


def test_between_two_plans_requests_at_their_ends_are_no_measure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each request has what its own room allows. A plan made while none has room does not count."""
    scheduler = bare(monkeypatch, plans_every_step=False)  # K until the planner is started
    scheduler._is_fixed = True
    scheduler._cadence.record_step(planning_seconds=1.0, step_seconds=1.0)
    found = []
    for rooms in ([0, 0], [3, 0], [3, 9], [9, 1]):
        requests = {f"r{i}": request(MAX_LEN - room - 3) for i, room in enumerate(rooms)}
        scheduler.requests = requests
        plan = plan_of(schedule(scheduler, *requests))
        lengths = plan.lengths or dict.fromkeys(requests, plan.length)
        found.append((plan.is_new, [*lengths.values()]))
    assert found == [(True, [0, 0]), (True, [3, 0]), (False, [3, 7]), (False, [7, 1])]
