"""Plans that steps repeat, against plans worked out anew for each step."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams

from support.bare_scheduler import WIDTH as K
from support.bare_scheduler import bare, plan_always, request, schedule, step
from support.planner_world import straight_costs
from vllm_dflash.engine.cadence import Cadence
from vllm_dflash.engine.v2.exchange import StepPlan, plan_of
from vllm_dflash.engine.v2.plan_cache import PlanCache

LONGEST, NODES = 4096, 15


class Requests(dict[str, Any]):
    """Counts how often a request is looked at."""

    asked = 0

    def get(self, name: str, default: Any = None) -> Any:
        self.asked += 1
        return super().get(name, default)


def repeating(
    monkeypatch: pytest.MonkeyPatch,
    lengths: dict[str, int],
    requests: Mapping[str, Any],
    *,
    runs_block: bool = True,
    tree_nodes: int = 0,
) -> Any:
    """Return a scheduler that repeats a plan in all steps."""
    scheduler = bare(monkeypatch, plans_every_step=False, tree_nodes=tree_nodes)
    monkeypatch.setattr(Cadence, "is_due", lambda *_: False)
    scheduler.requests = requests
    keep(scheduler._cache, lengths, runs_block=runs_block)
    return scheduler


def keep(cache: PlanCache, lengths: dict[str, int], *, runs_block: bool = True) -> None:
    found = np.array([*lengths.values()])
    cache.keep([*lengths], found, found + 1, runs_block=runs_block)


def planned(scheduler: Any, rows: dict[str, int]) -> StepPlan:
    scheduled, _ = step({}, {}, rows)
    plan: StepPlan = scheduler._plan_step(scheduled)
    return plan


def rows(names: str, number: int = 1 + K) -> dict[str, int]:
    return dict.fromkeys(names, number)


def test_an_unchanged_batch_costs_no_look_at_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM makes a new dictionary in each step, with the same numbers as long as all decode."""
    each, requests = {"a": 5, "b": 3}, Requests(a=request(), b=request())
    scheduler = repeating(monkeypatch, each, requests)
    first = planned(scheduler, rows("ab"))
    assert first == StepPlan(runs_block=True, length=5, lengths=each, is_new=False)
    asked = requests.asked
    for _ in range(4):
        assert planned(scheduler, rows("ab")) is first
    assert requests.asked == asked
    assert planned(scheduler, rows("ab", 3)) == first
    assert requests.asked == 2 * asked


def test_the_same_name_may_be_another_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or have a longer prompt: a session goes on, with a text that takes many steps to read."""
    requests = {"a": request()}
    scheduler = repeating(monkeypatch, {"a": 5}, requests)
    assert planned(scheduler, rows("a")).any_eligible
    requests["a"] = SimpleNamespace(
        **{**vars(request(0)), "num_tokens": 3000, "num_prompt_tokens": 3000}
    )
    assert not planned(scheduler, rows("a", 500)).any_eligible


@pytest.mark.parametrize("is_fixed", [False, True], ids=["planned", "fixed"])
def test_trees_are_planned_as_seldom_as_chains(
    monkeypatch: pytest.MonkeyPatch, is_fixed: bool
) -> None:
    """Each keeps its size until the next plan, and so do requests that join."""
    scheduler = bare(monkeypatch, plans_every_step=False, tree_nodes=NODES)
    due = [True, False, False, True]
    monkeypatch.setattr(Cadence, "is_due", lambda *_: due.pop(0))
    requests = {"a": request(), "end": request(LONGEST - 12), "chain": request()}
    requests["chain"].sampling_params = SamplingParams(logprobs=1)
    scheduler.requests, scheduler._is_fixed = requests, is_fixed
    if not is_fixed:
        scheduler.planner.start(straight_costs(), range(1 + NODES))
        scheduler._trees.gain._trees[-1] = 1e6  # they bring far more than chains
    asked = plan_always(monkeypatch, *[K] * 3, rate=1.0, of_blocks=5.0)
    found = []
    requests["new"] = request()
    first = ["a", "end", "chain"]
    for names in (first, first, ["chain", "new", "a"], first):
        plan = plan_of(schedule(scheduler, *names))
        assert plan.runs_block
        found.append((plan.is_new, plan.reports, plan.lengths))
    assert found == [
        (True, True, {"a": NODES, "end": 9, "chain": K}),
        (False, False, {"a": NODES, "end": 9, "chain": K}),
        (False, False, {"chain": K, "new": NODES, "a": NODES}),
        (True, True, {"a": NODES, "end": 9, "chain": K}),
    ]
    assert len(asked) == 2


BATCHES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=4)
"""How far each request is from the longest context, and from its last token."""
OWN_LIMITS = st.dictionaries(st.sampled_from("0123"), st.integers(0, K), max_size=2)


@settings(max_examples=2 * settings().max_examples)
@given(
    BATCHES,
    OWN_LIMITS,
    st.sampled_from([0, NODES]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_repeated_plans_are_those_made_anew(
    batch: list[tuple[int, int]],
    own: dict[str, int],
    nodes: int,
    is_fixed: bool,
    is_ahead: bool,
    seed: int,
) -> None:
    """However many drafts are accepted, near the models' longest context and near the last token;
    also if the batch changes, if another plan is kept, and after an experiment. `is_ahead`: a step
    is scheduled before the last one's tokens are known. `nodes`: of trees, for requests without a
    limit of their own."""
    random, most = np.random.default_rng(seed), max(K, nodes)

    def some() -> list[str]:
        count = random.integers(1, len(batch), endpoint=True)
        return [str(number) for number in random.permutation(len(batch))[:count]]

    def new_lengths() -> dict[str, int]:
        return {name: int(random.integers(0, most, endpoint=True)) for name in some()}

    requests = {
        str(number): request(LONGEST - room, left=left) for number, (room, left) in enumerate(batch)
    }
    for name in requests.keys() & own:
        requests[name].sampling_params = SamplingParams(logprobs=1)
    running, lengths = [*requests], new_lengths()
    drafts, waiting = dict.fromkeys(requests, 0), list[dict[str, int]]()
    with pytest.MonkeyPatch.context() as patch:
        scheduler = repeating(patch, lengths, requests, tree_nodes=nodes)
        scheduler._is_fixed = is_fixed
        scheduler._own_limits |= own
        for _ in range(20):
            other_batch, other_plan, experiment = random.random(3) < 0.15
            if other_batch:
                running = some()
            if other_plan:
                lengths = new_lengths()
                keep(scheduler._cache, lengths)
            if experiment:
                scheduler._cache.expire()
            scheduled = {name: 1 + drafts[name] for name in running}
            plan = planned(scheduler, scheduled)
            check(plan, lengths, scheduled, requests, own, nodes=nodes, is_fixed=is_fixed)
            for name, count in scheduled.items():
                requests[name].num_computed_tokens += count
            waiting.append({name: drafts[name] for name in running})
            drafts |= plan.lengths or dict.fromkeys(running, plan.length)
            if len(waiting) > is_ahead:  # some of its drafts are rejected
                for name, count in waiting.pop(0).items():
                    accepted = int(random.integers(0, count, endpoint=True))
                    requests[name].num_computed_tokens -= count - accepted
                    requests[name].num_tokens += 1 + accepted


def check(
    plan: StepPlan,
    kept: dict[str, int],
    scheduled: dict[str, int],
    requests: dict[str, Any],
    own: dict[str, int],
    *,
    nodes: int,
    is_fixed: bool,
) -> None:
    """Compare a plan with one written out. New requests get the longest length. Requests can use
    drafts that get three more tokens: the step's, a draft and the bonus token."""
    lengths, could = {}, is_fixed
    for name, count in scheduled.items():
        it = requests[name]
        context = it.num_computed_tokens + count
        most = own.get(name, max(K, nodes))
        limits = kept.get(name, max(kept.values())), LONGEST - context - 2, most
        lengths[name] = max(0, min(limits))
        left = it.num_prompt_tokens + it.max_tokens - it.num_tokens
        could |= context >= it.num_tokens and left > 2 and own.get(name, K) > 0
    could &= any(own.get(name) != 0 for name in scheduled)
    length = max(lengths.values()) * could
    assert (plan.any_eligible, plan.length, plan.runs_block) == (could, length, length > 0)
    assert (plan.lengths or dict.fromkeys(lengths, length)) == (
        lengths if could else dict.fromkeys(lengths, 0)
    )
    assert not plan.is_new


def test_a_plan_without_blocks_is_repeated_without(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = repeating(monkeypatch, {"a": 2}, {"a": request()}, runs_block=False)
    assert planned(scheduler, rows("a")) == StepPlan(length=2, is_new=False)


def test_a_request_that_is_gone_can_use_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not planned(repeating(monkeypatch, {"x": 5}, {}), rows("x")).any_eligible
