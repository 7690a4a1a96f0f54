"""Requests that limit their drafts: who does, and what V2's schedulers plan for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from support.bare_scheduler import bare, request, step
from vllm_dflash.engine.own_limits import OwnLimits
from vllm_dflash.engine.v2.exchange import StepPlan, plan_of
from vllm_dflash.engine.v2.v2_scheduler import V2AsyncScheduler, V2Scheduler


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


def schedule(scheduler: Any, names: str, **most: int | None) -> StepPlan:
    scheduled, _ = step(dict.fromkeys(names, 0), {})
    scheduled.scheduled_new_reqs = joining(**most)
    scheduler._update_after_schedule(scheduled)
    return plan_of(scheduled)


@pytest.mark.parametrize("kind", [V2AsyncScheduler, V2Scheduler])
def test_a_name_that_comes_again_has_its_new_limit(
    monkeypatch: pytest.MonkeyPatch, kind: type[Any]
) -> None:
    """Such as a session's, whose next turn has as many tokens as its last step had."""
    scheduler = bare(monkeypatch, kind, plans_every_step=False)
    scheduler._cadence.record_step(planning_seconds=1.0, step_seconds=1.0)
    scheduler.requests = {name: request(left=500) for name in "ab"}
    plans = [schedule(scheduler, "ab") for _ in range(4)]
    assert [plan.length for plan in plans] == [7] * 4
    assert schedule(scheduler, "ab", a=0).lengths == {"a": 0, "b": 7}
