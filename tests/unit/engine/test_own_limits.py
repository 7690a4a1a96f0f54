"""Requests that limit their drafts: who does, and what V2's schedulers plan for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from support.bare_scheduler import request, step, take_vllm_out
from support.planner_world import straight_costs
from vllm_dflash.engine.cadence import Cadence
from vllm_dflash.engine.own_limits import OwnLimits
from vllm_dflash.engine.v2.exchange import StepPlan, plan_of
from vllm_dflash.engine.v2.v2_scheduler import V2AsyncScheduler, V2Scheduler
from vllm_dflash.planning.planner import Planner


def joining(**most: Any) -> list[Any]:
    """Return requests that join a step, each with its `max_drafts`; None: it says nothing."""
    return [
        SimpleNamespace(
            req_id=name,
            sampling_params=SamplingParams(
                extra_args=None if value is None else {"dflash": {"max_drafts": value}}
            ),
        )
        for name, value in most.items()
    ]


def take(limits: OwnLimits, *ended: str, **most: Any) -> bool:
    output: Any = SimpleNamespace(scheduled_new_reqs=joining(**most), finished_req_ids={*ended})
    return limits.take(output)


def test_limits_come_and_go_with_their_requests() -> None:
    """A name may come again, in the step in which it ends, and with another limit or none. What is
    no limit was let through by somebody else's front end."""
    limits = OwnLimits()
    assert take(limits, a=None, b=2, c=0, wrong=-1)
    assert limits == {"b": 2, "c": 0}
    assert not take(limits)
    assert limits == {"b": 2, "c": 0}
    assert take(limits, "b", b=3)
    assert limits == {"b": 3, "c": 0}
    assert take(limits, c=None)
    assert not take(limits, "b", "another")
    assert limits == {}
    pooling: Any = SimpleNamespace(req_id="p", sampling_params=None)
    output: Any = SimpleNamespace(scheduled_new_reqs=[pooling], finished_req_ids=set())
    assert limits.take(output)
    assert limits == {}


def test_who_limits_nothing_costs_nothing() -> None:
    limits, most = OwnLimits(), np.array([7, 5, 1])
    assert limits.cut(most, "abc") is most
    assert not limits.forbid_all("abc")
    limits.update(a=0, b=9, c=3)
    assert limits.cut(most, "abc").tolist() == [0, 5, 1]
    assert not limits.forbid_all("abc")
    assert not limits.forbid_all("ax")
    assert limits.forbid_all("a")


@pytest.fixture(params=[V2AsyncScheduler, V2Scheduler])
def scheduler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    take_vllm_out(monkeypatch, is_async=request.param is V2AsyncScheduler, plans_every_step=False)
    return request.param()


def schedule(scheduler: Any, names: str, **most: int | None) -> StepPlan:
    scheduled, _ = step(dict.fromkeys(names, 0), {})
    scheduled.scheduled_new_reqs = joining(**most)
    scheduler._update_after_schedule(scheduled)
    return plan_of(scheduled)


def test_full_lengths_are_cut(scheduler: Any) -> None:
    """As fixed ones are, and adaptive ones before costs are known. In steps that are planned and in
    those that repeat the plan, in which somebody is new."""
    scheduler._is_fixed = True
    scheduler._cadence.record_step(planning_seconds=1.0, step_seconds=1.0)
    for is_new in (True, False):
        plan = schedule(scheduler, "abcdefghi", **({"b": 0, "c": 2, "d": 99} if is_new else {}))
        assert (plan.is_new, plan.runs_block, plan.length) == (is_new, True, 7)
        assert plan.lengths == dict.fromkeys("adefghi", 7) | {"b": 0, "c": 2}
    scheduler.requests = {"a": request(places=7), "b": request(places=7)}
    plan = schedule(scheduler, "abcdefghij", j=1)
    assert not plan.is_new
    assert plan.lengths == dict.fromkeys("adefghi", 7) | {"b": 0, "c": 2, "j": 1}
    assert len(scheduler.requests["a"].spec_token_ids) == 7


def test_the_planner_stays_within_the_limits(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler.planner.start(straight_costs(), range(8))
    monkeypatch.setattr(Cadence, "is_due", lambda *_: True)
    asked: list[list[int]] = []
    original = Planner.plan

    def plan(self: Planner, names: Any, context: Any, limits: Any, **more: Any) -> Any:
        asked.append(limits.tolist())
        return original(self, names, context, limits, **more)

    monkeypatch.setattr(Planner, "plan", plan)
    plans = [schedule(scheduler, "abc", b=0, c=2)] + [schedule(scheduler, "abc") for _ in range(99)]
    assert asked == [[7, 0, 2]] * 100
    lengths = [plan.lengths or dict.fromkeys("abc", plan.length) for plan in plans]
    assert max(each["a"] for each in lengths) > 2
    assert {each["b"] for each in lengths} == {0}
    assert max(each["c"] for each in lengths) in (1, 2)


@pytest.mark.parametrize("is_fixed", [False, True])
def test_nothing_is_planned_if_nobody_wants_drafts(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch, is_fixed: bool
) -> None:
    """Such steps are plain ones, and not skipped ones. Somebody else is drafted at once."""
    scheduler._is_fixed = is_fixed
    plan = schedule(scheduler, "ab", a=0, b=0)
    with monkeypatch.context() as patch:
        patch.setattr(Planner, "plan", lambda *_, **__: pytest.fail("asked"))
        for names in ("ab", "a"):
            plan = schedule(scheduler, names)
            assert (plan.runs_block, plan.length, plan.any_eligible) == (False, 0, False)
        assert scheduler.statistics.skipped_steps == 0
        # The one that wants drafts has come to its end.
        scheduler.requests = {"a": request(), "c": request(left=2)}
        if not is_fixed:
            assert not schedule(scheduler, "ac").any_eligible
    scheduler.requests = {"a": request(), "c": request()}
    assert schedule(scheduler, "ac").lengths == {"a": 0, "c": 7}


def test_a_name_that_comes_again_has_its_new_limit(scheduler: Any) -> None:
    """Such as a session's, whose next turn has as many tokens as its last step had."""
    scheduler._cadence.record_step(planning_seconds=1.0, step_seconds=1.0)
    scheduler.requests = {name: request(left=500) for name in "ab"}
    plans = [schedule(scheduler, "ab") for _ in range(4)]
    assert [plan.length for plan in plans] == [7] * 4
    assert schedule(scheduler, "ab", a=0).lengths == {"a": 0, "b": 7}
