"""V2's schedulers: what they learn from a step's output, and what they plan."""

import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import DraftTokenIds

from support.bare_scheduler import CONTEXT_TOKENS, MAX_LEN, WIDTH, request, step, take_vllm_out
from support.fake_time import FakeTime
from support.planner_world import profiled_costs, straight_costs
from vllm_dflash.config.engine_options import EngineOptions
from vllm_dflash.engine.cadence import Cadence
from vllm_dflash.engine.reporting.figures import take_figures
from vllm_dflash.engine.v2 import v2_scheduler
from vllm_dflash.engine.v2.exchange import (
    CHAINS_ONLY,
    COUNTED,
    FACTS,
    OUTCOMES,
    StepPlan,
    WorkerFacts,
    plan_of,
)
from vllm_dflash.engine.v2.v2_scheduler import V2AsyncScheduler, V2Scheduler
from vllm_dflash.planning.costs import Curve
from vllm_dflash.planning.planner import Planner
from vllm_dflash.planning.step import BLOCK, NO_DRAFTS, Outcomes, Plan, StepRecord

KINDS = [V2AsyncScheduler, V2Scheduler]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


def bare(monkeypatch: pytest.MonkeyPatch, kind: Any = V2AsyncScheduler, **engine: Any) -> Any:
    """Return a scheduler without vLLM's below it."""
    take_vllm_out(monkeypatch, is_async=kind is V2AsyncScheduler, **engine)
    return kind()


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch, kind: Any) -> Any:
    return bare(monkeypatch, kind)


@pytest.fixture
def observed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[StepRecord, Outcomes | None]]:
    """Steps that a started planner learns from, each with the outcomes of its drafts."""
    seen: list[tuple[StepRecord, Outcomes | None]] = []
    learned: list[tuple[StepRecord, Outcomes]] = []

    def observe(_: Planner, step: StepRecord) -> None:
        of_step = [outcomes for one, outcomes in learned if one is step]
        seen.append((step, of_step[0] if of_step else None))

    started = property(lambda _: True, lambda *_: None)
    monkeypatch.setattr(Planner, "is_started", started, raising=False)
    monkeypatch.setattr(Planner, "learn_outcomes", lambda _, *what: learned.append(what))
    monkeypatch.setattr(Planner, "record_step", observe)
    return seen


def ahead(lengths: Sequence[int], *, runs_block: bool = True, **fields: Any) -> Plan:
    """Return a plan in which the next step verifies so many drafts of each request."""
    return Plan(np.full(len(lengths), runs_block), WIDTH * runs_block, np.array(lengths), **fields)


def plans(monkeypatch: pytest.MonkeyPatch, *lengths: int, runs_block: bool = True) -> list[Any]:
    """Make every new plan this one; return what the planner was asked."""
    asked: list[Any] = []

    def plan(self: Any, *what: Any, steps: int) -> Plan:
        asked.append(what)
        return ahead(lengths, runs_block=runs_block)

    monkeypatch.setattr(Planner, "plan", plan)
    return asked


def schedule(scheduler: Any, *names: str) -> Any:
    """Schedule a step in which each request has one row."""
    scheduled, _ = step(dict.fromkeys(names, 0), {})
    scheduler._update_after_schedule(scheduled)
    return scheduled


def places_behind(scheduler: Any, *names: str) -> int:
    places: int = schedule(scheduler, *names).num_spec_tokens_to_schedule
    return places


def test_without_a_planner_a_step_with_room_for_drafts_runs_a_block() -> None:
    """As from a user's scheduler. Workers report, since nobody says that they need not."""
    scheduled = SchedulerOutput.make_empty()
    for places in (0, 1, 7):
        scheduled.num_spec_tokens_to_schedule = places
        assert plan_of(scheduled) == StepPlan(runs_block=places > 0, length=places, reports=True)


def test_before_anything_is_known_every_step_drafts_to_the_full(scheduler: Any) -> None:
    scheduled = schedule(scheduler, *map(str, range(64)))
    assert scheduled.num_spec_tokens_to_schedule == 7
    assert plan_of(scheduled) == StepPlan(step=1, runs_block=True, length=7)


def test_what_workers_found_out_comes_with_the_first_output(scheduler: Any) -> None:
    scheduled, output = step({"a": 0}, {"a": 1})
    facts = WorkerFacts(profiled_costs(), [0, 5, 7], ragged_seconds=2.0)
    FACTS.attach(output, facts)
    (outputs,) = scheduler.update_from_output(scheduled, output).values()
    assert isinstance(outputs, EngineCoreOutputs)
    planner = scheduler.planner
    assert planner.costs is facts.costs
    assert planner._ragged_seconds == 2.0


def test_the_plan_goes_with_the_step(scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says whether a block runs; the step has places for the most drafts of any request."""
    for number, runs_block in enumerate((True, False), start=1):
        plans(monkeypatch, 3, 0, 3, 1, runs_block=runs_block)
        scheduled = schedule(scheduler, *"abcd")
        assert scheduled.num_spec_tokens_to_schedule == 3
        each = {"a": 3, "b": 0, "c": 3, "d": 1}
        assert plan_of(scheduled) == StepPlan(number, runs_block, length=3, lengths=each)
    plans(monkeypatch, 2, 2, 2, 2)
    assert plan_of(schedule(scheduler, *"abcd")).lengths is None  # they are alike
    plans(monkeypatch, 0, 0, 0, 0, runs_block=True)  # nobody has room
    scheduled = schedule(scheduler, *"abcd")
    assert scheduled.num_spec_tokens_to_schedule == 0
    assert not plan_of(scheduled).runs_block


def test_trees_get_places_where_they_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number with the best rate for what rows take. All places if nothing is planned; a chain's
    without a block, or if a worker says that all drafts are chains."""
    scheduler = bare(monkeypatch, tree_nodes=31)
    scheduler.requests = {"a": request()}
    assert places_behind(scheduler, "a") == 31
    plan = ahead([3], rate=240.0, of_blocks=float(np.log(1 + 3)))
    monkeypatch.setattr(Planner, "plan", lambda *_, steps: plan)
    planner, gain = scheduler.planner, scheduler._trees.gain
    planner.start(straight_costs(), [0, 3, 7, 15, 31], ragged_seconds=1.0)
    assert places_behind(scheduler, "a") == 3
    rows = planner.costs.verify
    planner.costs.verify = Curve(rows.counts, rows.seconds / 10.0)
    assert places_behind(scheduler, "a") == 7  # the same gain is assumed for all sizes
    gain._chains[:], gain._trees[:] = 1e6, [1e6, 1.7e6, 1.71e6]
    assert places_behind(scheduler, "a") == 15
    gain._trees[2] *= 3.0
    assert places_behind(scheduler, "a") == 31
    planner.start(planner.costs, [0, 3, 7, 15], ragged_seconds=1.0)  # without a graph for 31
    assert places_behind(scheduler, "a") == 15
    monkeypatch.setattr(Planner, "plan", lambda *_, steps: replace(plan, width=0))
    assert places_behind(scheduler, "a") == 3
    monkeypatch.setattr(Planner, "plan", lambda *_, steps: plan)
    scheduled, output = step({"a": 0}, {"a": 1})
    CHAINS_ONLY.attach(output, True)
    scheduler.update_from_output(scheduled, output)
    assert places_behind(scheduler, "a") == 3


@pytest.mark.parametrize("kept", [7, 0], ids=["0.32", "0.33"])
def test_trees_leave_room_for_the_blocks_of_all_requests(
    monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """vLLM 0.32 subtracts a block's tokens from a step for each request. It would count a tree's
    nodes twice, and leave out the requests that come last."""
    take_vllm_out(monkeypatch, tree_nodes=31)
    config = Scheduler.vllm_config
    config.speculative_config.max_num_new_slots_for_drafting = kept
    for rows, places in ((1 + 31, 31), (1 + 20, 20), (1 + 7, 7)):
        config.scheduler_config.max_num_batched_tokens = 16 * (rows + kept)
        scheduler = V2AsyncScheduler()
        assert scheduler.vllm_config.speculative_config.num_speculative_tokens == 7
        assert scheduler.num_spec_tokens == 31
        scheduler.requests = {str(number): request() for number in range(16)}
        assert places_behind(scheduler, *scheduler.requests) == places


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
    monkeypatch.setattr(EngineOptions.of(Scheduler.vllm_config), "most_active", asked)
    monkeypatch.setattr(Scheduler, "max_num_active_reqs", of_vllm)
    Scheduler.vllm_config.scheduler_config.max_num_seqs = 1024
    assert V2AsyncScheduler().max_num_active_reqs == active


def test_each_request_has_places_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five requests, in the step's own order. An inner one gets none, one is in its prompt, one is
    at its limit, and one was just admitted."""
    scheduler = bare(monkeypatch)
    requests = {name: request(number, places=5) for number, name in enumerate("abwn", 100)}
    requests["p"] = request(200)  # in its prompt: vLLM gives it no places
    requests["e"] = request(MAX_LEN - 4, places=5)
    scheduler.requests = requests
    asked = plans(monkeypatch, 1, 3, 0, 5, 4)
    scheduled, _ = step(dict.fromkeys("enbpa", 0), {}, {"e": 1, "n": 1, "b": 6, "p": 30, "a": 2})
    scheduler._update_after_schedule(scheduled)
    places = {name: len(one.spec_token_ids) for name, one in requests.items()}
    assert places == {"a": 4, "b": 0, "w": 5, "n": 3, "p": 0, "e": 1}
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
    asked = plans(monkeypatch, *[0] * 5)
    places_behind(scheduler, *contexts)
    ((_, _, limits),) = asked
    assert limits.tolist() == [7, 7, 3, 0, 0]


@pytest.mark.parametrize(
    ("requests", "is_planned"),
    [
        ([request(left=2)], False),  # this step's token and one more, with no draft before it
        ([request(left=3)], True),
        ([request(left=2), request(left=3), request(left=2)], True),
        ([SimpleNamespace(**{**vars(request()), "num_tokens": 200})], False),  # in its prompt
    ],
)
def test_nothing_is_drafted_that_nobody_could_use(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch, requests: list[Any], is_planned: bool
) -> None:
    scheduler.planner.start(straight_costs(), range(8))
    scheduler.requests = {str(number): each for number, each in enumerate(requests)}
    asked = plans(monkeypatch, *[7] * len(requests))
    scheduled = schedule(scheduler, *scheduler.requests)
    assert bool(asked) == is_planned
    assert plan_of(scheduled).runs_block == is_planned
    assert plan_of(scheduled).any_eligible == is_planned
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
        plans(monkeypatch, *lengths)
        schedule(scheduler, *"abc")
        scheduler.update_draft_token_ids(drafts)
        assert [each.spec_token_ids for each in scheduler.requests.values()] == taken


def test_what_was_counted_is_told_now_and_then(scheduler: Any) -> None:
    """All workers get the same copy, while the scheduler goes on counting. So it is for fixed
    lengths."""
    told = []
    for number in range(100):
        counted = plan_of(schedule(scheduler, "a")).counted
        scheduler.statistics.probes = number
        if counted is None:
            continue
        told.append(number)
        assert counted["probes"] == number - 1
        assert counted["costs"] is not scheduler.statistics.costs
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


def test_learns_from_verified_drafts_alone(scheduler: Any, observed: list[Any]) -> None:
    """Two verified requests, beside a prompt chunk that samples nothing and an undrafted request.
    The worker's batch has an order of its own, a different one in every step."""
    produced = {"b": 4, "p": 0, "c": 1, "a": 1}
    scheduler.update_from_output(*step({"p": 0, "a": 0, "b": 3, "c": 2}, produced))
    ((seen, outcomes),) = observed
    assert list(seen.ids) == [*"pabc"]
    assert (seen.verified.tolist(), seen.accepted.tolist()) == ([0, 0, 3, 2], [0, 0, 3, 0])
    assert outcomes.admitted.tolist() == [0, 0, 3, 2]
    assert (outcomes.confidence > 0).sum(axis=1).tolist() == [0, 0, 3, 2]


def test_padding_of_requests_that_were_just_admitted_is_no_draft(
    scheduler: Any, observed: list[Any]
) -> None:
    """vLLM gives them as many placeholders as others have drafts, and all of these are rejected."""
    drafts, produced = {"o": 7, "n": 7, "r": 7}, {"o": 3, "n": 1, "r": 1}
    scheduler.update_from_output(*step(drafts, produced, placeholders="nr"))
    ((seen, outcomes),) = observed
    assert outcomes.source.tolist() == [BLOCK, NO_DRAFTS, NO_DRAFTS]
    assert seen.verified.tolist() == [7, 7, 7]  # verifying them still takes time


def test_rows_are_those_that_the_device_kept(scheduler: Any, observed: list[Any]) -> None:
    """Five of the 2 x 7 that had places, with vLLM's adaptive verification."""
    drafts, produced = {"a": 7, "b": 7, "p": 0}, {"a": 2, "b": 1, "p": 0}
    rows = {"a": 8, "b": 8, "p": 60}
    scheduler.update_from_output(*step(drafts, produced, rows, admitted={"a": 4, "b": 1}))
    ((seen, _),) = observed
    assert seen.rows == 60 + 2 + 5
    assert seen.verified.tolist() == [4, 1, 0]


def test_placeholders_that_fill_its_budget_are_rows(scheduler: Any, observed: list[Any]) -> None:
    """The request without drafts of its own had three placeholders admitted."""
    drafts, produced, admitted = {"a": 7, "b": 7}, {"a": 2, "b": 1}, {"a": 4, "b": 3}
    scheduler.update_from_output(*step(drafts, produced, admitted=admitted, placeholders="b"))
    ((seen, outcomes),) = observed
    assert seen.rows == 2 + 4 + 3
    assert outcomes.source.tolist() == [BLOCK, NO_DRAFTS]


def test_drafts_are_counted_by_the_device(scheduler: Any, observed: list[Any]) -> None:
    """Since the engine's start, so a count that comes again changes nothing. It comes with reports,
    and with the step without tokens that an engine becomes idle with."""
    steps = [step({"a": 3}, {"a": 3}), step({"a": 3}, {"a": 3}, reports=False), step({}, {})]
    counts = np.array([[1, 2, 1, 6], [3, 9, 4, 0]])
    for number, (scheduled, output) in enumerate(steps):
        if number != 1:
            COUNTED.attach(output, counts + number)
        scheduler.update_from_output(scheduled, output)
        found, more = scheduler.statistics, 2 * (number == 2)
        assert (found.verifications, found.free_verifications) == (4 + 2 * more, 3 + more)
        assert (found.draft_tokens, found.free_draft_tokens) == (11 + 2 * more, 9 + more)
        assert (found.accepted_tokens, found.free_accepted_tokens) == (5 + 2 * more, 4 + more)
        assert found.nan_drafts == 6 + 2 * more


def test_vllm_counts_what_was_scheduled_unless_a_report_says_more(
    scheduler: Any, observed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request's drafts that were verified, and not places that stayed empty. Without a report,
    vLLM's own method is called, and nothing of ours between."""
    seen: list[Any] = []
    monkeypatch.setattr(
        Scheduler, "make_spec_decoding_stats", lambda *given: seen.append(given[1:])
    )
    for reports in (True, False, True):
        drafts, produced = {"a": 3, "b": 3}, {"a": 2, "b": 1}
        scheduler.update_from_output(
            *step(drafts, produced, admitted={"a": 2}, placeholders="b", reports=reports)
        )
        for name, accepted in (("a", 1), ("b", 0)):
            scheduler.make_spec_decoding_stats("so far", 3, accepted, None, name)
        own = scheduler.make_spec_decoding_stats.__func__ is Scheduler.make_spec_decoding_stats
        assert own is not reports
    counted, scheduled = ("so far", 2, 1, None, "a"), [("so far", 3, 1, None, "a")]
    assert seen == [counted, *scheduled, ("so far", 3, 0, None, "b"), counted]


def test_reports_are_asked_for_where_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """New plans ask for reports, and so do steps behind a plan with drafts of texts alone: only a
    report says which requests had any."""
    scheduler = bare(monkeypatch, plans_every_step=False)
    due = [True, False, False, True, False, False, True, False]
    monkeypatch.setattr(Cadence, "is_due", lambda *_: due.pop(0))
    found = []
    for lengths, runs_block in (((3, 3), True), ((3, 0), False), ((0, 0), False)):
        plans(monkeypatch, *lengths, runs_block=runs_block)
        for _ in range(3)[: len(due)]:
            plan = plan_of(schedule(scheduler, *"ab"))
            found.append((plan.is_new, plan.reports))
    of_blocks = [(True, True), (False, False), (False, False)]
    of_texts = [(True, True), (False, True), (False, True)]
    # A plan with nothing to verify follows one of texts.
    assert found == [*of_blocks, *of_texts, (True, True), (False, False)]


def test_where_vllm_drops_drafts_every_step_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the device knows how many were verified, with vLLM's adaptive verification."""
    for drops_drafts in (True, False):
        scheduler = bare(monkeypatch, plans_every_step=False, drops_drafts=drops_drafts)
        monkeypatch.setattr(Cadence, "is_due", lambda cadence, _: not cadence._num_requests)
        plans(monkeypatch, 3, 3)
        found = []
        for number in range(3):
            scheduler._cadence._num_requests = number
            found.append(plan_of(schedule(scheduler, *"ab")).reports)
        assert found == [True, drops_drafts, drops_drafts]


def test_steps_are_timed_where_the_same_requests_only_decode(
    scheduler: Any, observed: list[Any]
) -> None:
    decode = step({"a": 3, "b": 3}, {"a": 2, "b": 1})
    for one in (
        decode,  # no step before it to time it by
        decode,
        step({"a": 3, "b": 3, "p": 0}, {"a": 1, "b": 1, "p": 0}, {"a": 4, "b": 4, "p": 60}),
        decode,  # the time since the prompt's step is this one's
        step({"a": 3, "b": 3}, {"b": 2, "a": 1}),
    ):
        scheduler.update_from_output(*one)
    steps = [seen for seen, _ in observed]
    assert [seen.rows for seen in steps if seen.target_seconds] == [8] * 3
    assert [bool(seen.target_seconds) for seen in steps] == [False, True, False, True, True]


def test_steps_of_nobody_teach_nothing(scheduler: Any) -> None:
    """After a request of one token, before any request decoded: there is no time to learn from."""
    first, output = step({"a": 0}, {"a": 1}, {"a": 9})
    FACTS.attach(output, WorkerFacts(costs := profiled_costs(), range(8)))
    before = costs.verify.seconds.tolist()
    for one in ((first, output), step({}, {}), step({}, {}), step({}, {})):
        scheduler.update_from_output(*one)
    assert costs.verify.seconds.tolist() == before


def test_a_block_takes_part_of_the_time_of_the_step_behind_it(
    scheduler: Any, observed: list[Any]
) -> None:
    """vLLM returns a step's tokens before it drafts, so the next output waits for the block."""
    for drafts, next_drafts in ((0, 3), (3, 0), (0, 0)):
        scheduler.update_from_output(
            *step({"a": drafts, "b": drafts}, {"a": 1, "b": 1}, next_drafts=next_drafts)
        )
    assert [seen.draft_rows for seen, _ in observed] == [0, 2 * 8, 0]


def test_blocks_of_k_rows_are_taken_for_that(
    monkeypatch: pytest.MonkeyPatch, observed: list[Any]
) -> None:
    scheduler = bare(monkeypatch, block_rows=7)
    for drafts, next_drafts in ((0, 3), (3, 0)):
        scheduler.update_from_output(*step({"a": drafts}, {"a": 1}, next_drafts=next_drafts))
    assert [seen.draft_rows for seen, _ in observed] == [0, 7]


def run(scheduler: Any, monkeypatch: pytest.MonkeyPatch, steps: list[Any]) -> dict[str, float]:
    """Figures that these steps, and one without tokens after them, send to the front end."""
    sent: dict[str, float] = {}
    for scheduled, output in [*steps, step({}, {})]:
        outputs = EngineCoreOutputs(scheduler_stats=(stats := SchedulerStats()))
        monkeypatch.setattr(Scheduler, "update_from_output", lambda *_, o=outputs: {0: o})
        scheduler._update_after_schedule(scheduled)
        time.sleep(0.0)
        scheduler.update_from_output(scheduled, output)
        for name, more in take_figures(stats).items():
            sent[name] = sent.get(name, 0.0) + more
    return sent


def test_figures_are_counted_here_and_sent_when_the_engine_runs_dry(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeTime()
    for module in ("engine.v2.v2_scheduler", "engine.step_clock", "planning.step"):
        monkeypatch.setattr(f"vllm_dflash.{module}.time", clock)
    monkeypatch.setattr(time, "sleep", lambda _: setattr(clock, "now", clock.now + 0.05))
    scheduler.planner.start(profiled_costs(), range(8))

    def plan(self: Any, ids: list[str], *_: Any, steps: int) -> Plan:
        clock.now += 0.001
        self.speedup = 1.5
        return ahead([2] * len(ids))

    monkeypatch.setattr(Planner, "plan", plan)
    # The first has no step before it to be timed by; the others make 3 and 5 tokens.
    steps = [step({"a": 2, "b": 2}, {"a": a, "b": b}) for a, b in ((1, 1), (2, 1), (3, 2))]
    sent = run(scheduler, monkeypatch, steps)
    plain = sent.pop("plain_tokens")
    assert plain > 0
    assert sent.pop("expected_tokens") == pytest.approx(1.5 * plain)
    assert sent == pytest.approx(
        {
            "drafted_steps": 3,
            "drafted_requests": 6,
            "planned_tokens": 12,
            "produced_tokens": 8,
            "step_seconds": 2 * 0.051,
            "planning_seconds": 3 * 0.001,
        }
    )


def test_steps_without_a_block_are_skipped_ones(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if their drafts come from texts."""
    plans(monkeypatch, 3, runs_block=False)
    sent = run(scheduler, monkeypatch, [step({"a": 0}, {"a": 1}), step({"a": 0}, {"a": 1})])
    assert sent["skipped_steps"] == 2
    assert "drafted_steps" not in sent
    assert "drafted_requests" not in sent


def test_a_fixed_length_is_counted(scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner is never started."""
    sent = run(scheduler, monkeypatch, [step({"a": 7, "b": 7}, {"a": 1, "b": 8}, next_drafts=7)])
    counted = "drafted_steps", "drafted_requests", "planned_tokens"
    assert [sent.get(name) for name in counted] == [1, 2, 14]


def test_steps_are_judged_by_their_contexts(
    scheduler: Any, observed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The context of a request that was aborted while its step ran is no longer known."""
    asked = plans(monkeypatch, 0, 0, 0)
    schedule(scheduler, *"abc")
    assert asked[0][1].tolist() == [CONTEXT_TOKENS + 1] * 3
    scheduler.requests = {"b": SimpleNamespace(num_computed_tokens=7)}
    scheduler.update_from_output(*step({"a": 0, "b": 0}, {"a": 1, "b": 1}))
    assert observed[0][0].context_lens.tolist() == [0, 7]


def test_a_step_that_outlived_one_of_its_requests_teaches_no_times(
    scheduler: Any, observed: list[Any]
) -> None:
    """An asynchronous step usually starts before it is known that the request has ended."""
    both = {name: SimpleNamespace(num_computed_tokens=7) for name in "ab"}
    for requests in (both, both, {"b": both["b"]}, both):
        scheduler.requests = requests
        scheduler.update_from_output(*step({"a": 0, "b": 0}, {"a": 1, "b": 1}))
    timed = [seen.target_seconds > 0.0 for seen, _ in observed]
    assert timed == [False, True, False, True]  # there was no step before the first


def test_what_became_of_trees_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each size up to the tree's own. The device reports in an order of its own."""
    scheduler = bare(monkeypatch, tree_nodes=31)
    scheduled, output = step({"a": 15, "b": 15}, {"b": 3, "a": 5})
    table = np.zeros((2, 8 + 3 + 7))
    table[:, 0], table[:, 1] = BLOCK, 15
    table[:, 6], table[:, 7] = [4, 5], [1, 3]  # of the likeliest chains
    table[1, 8:11] = 4, 5, 5  # the other request had no tree
    OUTCOMES.attach(output, table)
    scheduler.update_from_output(scheduled, output)
    assert scheduler._trees.gain._trees.tolist() == [3, 4, 0]
    assert scheduler._trees.gain._chains.tolist() == [3, 3, 0]


def test_short_steps_are_not_all_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan also applies to the steps before the next one, and to requests that are new in them.
    The outputs of those steps teach nothing."""
    scheduler = bare(monkeypatch, plans_every_step=False)
    scheduler.planner.start(profiled_costs(), [7])
    scheduler._cadence.record_times(
        planning_seconds=1e-3, step_seconds=1e-2
    )  # plan one step of ten
    asked, observed = plans(monkeypatch, *[5] * 9), []
    observe = scheduler.planner.record_step
    monkeypatch.setattr(
        scheduler.planner, "record_step", lambda *what: observed.append(what) or observe(*what)
    )
    found = []
    for number in range(21):
        names = {f"r{number // 7 + i}": 0 for i in range(9)}  # some come and go
        scheduled, output = step(dict.fromkeys(names, 7), dict.fromkeys(names, 3))
        scheduler._update_after_schedule(scheduled)
        plan = plan_of(scheduled)
        found.append(plan.is_new)
        assert (plan.step, plan.runs_block, plan.length) == (1 + number, True, 5)
        assert scheduled.num_spec_tokens_to_schedule == 5
        scheduler.update_from_output(scheduled, output)
        scheduler._cadence._planning, scheduler._cadence._step = 1e-3, 1e-2
    assert found == [n % 10 == 0 for n in range(21)]
    assert len(asked) == len(observed) == 3


def test_the_step_that_was_planned_is_learned_from(
    monkeypatch: pytest.MonkeyPatch, observed: list[Any]
) -> None:
    """Not the one whose output comes next: an asynchronous scheduler is a step ahead. What a step
    took is known if the output before it was seen as well."""
    scheduler = bare(monkeypatch, plans_every_step=False)
    plans(monkeypatch, 3, 3)
    due = [False, True, False, False, True, False]
    monkeypatch.setattr(Cadence, "is_due", lambda *_: due.pop(0))
    scheduler._cache.keep_plan({"a": 3}, runs_block=True)
    waiting = []
    for number in range(6):
        scheduled, output = step({"a": 3, "b": 3}, {"a": 1 + number % 3, "b": 1})
        scheduler._update_after_schedule(scheduled)
        waiting.append((scheduled, output))
        if number:
            scheduler.update_from_output(*waiting.pop(0))
    scheduler.update_from_output(*waiting.pop(0))
    assert [seen.produced[0] for seen, _ in observed] == [1 + 1, 1 + 4 % 3]
    assert all(seen.target_seconds > 0.0 for seen, _ in observed)
    assert [seen.draft_rows for seen, _ in observed] == [16, 16]


def test_what_a_repeated_step_took_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeTime()
    monkeypatch.setattr("vllm_dflash.engine.step_clock.time", clock)
    scheduler = bare(monkeypatch, plans_every_step=False)
    monkeypatch.setattr(Cadence, "is_due", lambda *_: False)
    scheduler._cache.keep_plan({"a": 3}, runs_block=True)
    for _ in range(3):
        scheduled, output = step({"a": 3}, {"a": 1}, reports=False)
        scheduler._update_after_schedule(scheduled)
        clock.now += 0.05
        scheduler.update_from_output(scheduled, output)
    assert scheduler.statistics.step_seconds == pytest.approx(0.1)


def test_between_two_plans_requests_at_their_ends_are_no_measure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each request has what its own room allows. A plan made while none has room does not count."""
    scheduler = bare(monkeypatch, plans_every_step=False)  # K until the planner is started
    scheduler._is_fixed = True
    scheduler._cadence.record_times(planning_seconds=1.0, step_seconds=1.0)
    found = []
    for rooms in ([0, 0], [3, 0], [3, 9], [9, 1]):
        requests = {f"r{i}": request(MAX_LEN - room - 3) for i, room in enumerate(rooms)}
        scheduler.requests = requests
        scheduled = schedule(scheduler, *requests)
        length = scheduled.num_spec_tokens_to_schedule
        plan = plan_of(scheduled)
        lengths = plan.lengths or dict.fromkeys(requests, length)
        found.append((plan.is_new, [*lengths.values()]))
    assert found == [(True, [0, 0]), (True, [3, 0]), (False, [3, 7]), (False, [7, 1])]
