"""Plans that steps repeat, against plans worked out anew for each step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_dflash.engine.v2.exchange import StepPlan
from vllm_dflash.engine.v2.plan_cache import PlanCache, can_use_drafts, tokens_left

LONGEST, K = 4096, 7


def request(context: int = 100, left: int = 500) -> Any:
    """Return a request that decodes, with so many tokens of context, and `left` to come."""
    return SimpleNamespace(
        num_computed_tokens=context,
        num_tokens=context + 1,
        num_prompt_tokens=context,
        max_tokens=1 + left,
    )


class Requests(dict[str, Any]):
    """Counts how often a request is looked at."""

    asked = 0

    def get(self, name: str, default: Any = None) -> Any:
        self.asked += 1
        return super().get(name, default)


def cache_of(
    lengths: dict[str, int], own_limits: dict[str, int] | None = None, **kind: bool
) -> Any:
    cache = PlanCache(LONGEST, K, own_limits or {}, is_fixed=kind.get("is_fixed", False))
    assert not cache
    cache.keep_plan(lengths, runs_block=kind.get("runs_block", True))
    assert cache
    return cache


def rows(names: str, number: int = 1 + K) -> dict[str, int]:
    return dict.fromkeys(names, number)


def test_an_unchanged_batch_costs_no_look_at_its_requests() -> None:
    """vLLM makes a new dictionary in each step, with the same numbers as long as all decode."""
    cache, requests = cache_of({"a": 5, "b": 3}), Requests(a=request(), b=request())
    first = cache.repeat(rows("ab"), requests)
    each = {"a": 5, "b": 3}
    assert first == StepPlan(runs_block=True, length=5, lengths=each, is_new=False)
    assert requests.asked == 2
    for _ in range(4):
        assert cache.repeat(rows("ab"), requests) is first
    assert requests.asked == 2
    assert cache.repeat(rows("ab", 3), requests) == first
    assert requests.asked == 4


@pytest.mark.parametrize("after", ["a", "abc", "ac", "c"])
def test_another_batch_gets_another_plan(after: str) -> None:
    """New requests get the longest length."""
    cache, requests = cache_of({"a": 2, "b": 3}), Requests(a=request(), b=request(), c=request())
    assert cache.repeat(rows("ab"), requests).lengths == {"a": 2, "b": 3}
    lengths = {name: {"a": 2, "b": 3, "c": 3}[name] for name in after}
    plan = cache.repeat(rows(after), requests)
    assert plan.length == max(lengths.values())
    assert plan.lengths == (lengths if len({*lengths.values()}) > 1 else None)
    assert cache.repeat(rows("ab"), requests).lengths == {"a": 2, "b": 3}


def test_a_new_plan_replaces_the_one_that_was_repeated() -> None:
    cache, requests = cache_of({"a": 2, "b": 2}), Requests(a=request(), b=request())
    for _ in range(2):
        assert cache.repeat(rows("ab"), requests) == StepPlan(
            runs_block=True, length=2, is_new=False
        )
    cache.keep_plan({"a": 4, "b": 4}, runs_block=False)
    assert cache.repeat(rows("ab"), requests) == StepPlan(length=4, is_new=False)


def test_without_drafts_no_block_runs() -> None:
    cache, requests = cache_of({"a": 0, "b": 0}), Requests(a=request(), b=request())
    assert cache.repeat(rows("ab"), requests) == StepPlan(is_new=False)


def test_a_repeated_plan_keeps_the_limits_that_requests_set() -> None:
    """Also for new ones. Nobody else could use drafts at the end."""
    own = {"b": 2, "c": 0, "n": 3}
    cache, requests = cache_of({"a": 5, "b": 5, "c": 5}, own), Requests.fromkeys("bcn", request())
    requests["a"] = request(left=2)
    assert cache.repeat(rows("abcn"), requests).lengths == {"a": 5, "b": 2, "c": 0, "n": 3}
    plan = cache.repeat(rows("ac"), requests)
    assert (plan.any_eligible, plan.length) == (False, 0)


@pytest.mark.parametrize("is_fixed", [False, True])
def test_nothing_is_planned_that_nobody_could_use(is_fixed: bool) -> None:
    """Some are at their ends, in their prompts, or gone. Fixed lengths are drafted in any case."""
    in_prompt = SimpleNamespace(**{**vars(request()), "num_tokens": 300})
    requests = Requests(a=request(left=2), p=in_prompt)
    cache = cache_of({"a": 5, "p": 5}, is_fixed=is_fixed)
    length = 5 * is_fixed
    for names in ("a", "p", "ap", "x"):
        plan = cache.repeat(rows(names), requests)
        assert (plan.any_eligible, plan.length, plan.runs_block) == (
            is_fixed,
            length,
            is_fixed,
        )
    requests["b"] = request(left=3)
    assert cache.repeat(rows("apb"), requests).any_eligible


def test_the_same_name_may_be_another_request() -> None:
    """Or have a longer prompt: a session goes on, with a text that takes many steps to read."""
    cache, requests = cache_of({"a": 5}), Requests(a=request())
    assert cache.repeat(rows("a"), requests).any_eligible
    requests["a"] = SimpleNamespace(
        **{**vars(request(0)), "num_tokens": 3000, "num_prompt_tokens": 3000}
    )
    assert not cache.repeat(rows("a", 500), requests).any_eligible


BATCHES = st.lists(
    st.tuples(st.integers(0, K), st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=4
)
"""For each request: its planned length, and how far it is from the longest context and from its
last token."""


@given(BATCHES, st.booleans(), st.booleans(), st.data())
def test_repeated_plans_are_those_made_anew(
    batch: list[tuple[int, int, int]], is_fixed: bool, is_ahead: bool, data: st.DataObject
) -> None:
    """However many drafts are accepted, near the models' longest context and near the last token.
    `is_ahead`: a step is scheduled before the last one's tokens are known."""
    lengths = {str(number): length for number, (length, _, _) in enumerate(batch)}
    requests = {
        str(number): request(LONGEST - room, left) for number, (_, room, left) in enumerate(batch)
    }
    kept = cache_of(lengths, is_fixed=is_fixed)
    planned, waiting = dict.fromkeys(requests, 0), list[dict[str, int]]()
    for _ in range(12):
        scheduled = {name: 1 + count for name, count in planned.items()}
        plan = kept.repeat(scheduled, requests)
        assert plan == cache_of(lengths, is_fixed=is_fixed).repeat(scheduled, requests)
        check(plan, lengths, scheduled, requests, is_fixed=is_fixed)
        for name, count in scheduled.items():
            requests[name].num_computed_tokens += count
        waiting.append(planned)
        planned = dict(plan.lengths or dict.fromkeys(requests, plan.length))
        if len(waiting) > is_ahead:  # some of its drafts are rejected
            for name, drafts in waiting.pop(0).items():
                accepted = data.draw(st.integers(0, drafts))
                requests[name].num_computed_tokens -= drafts - accepted
                requests[name].num_tokens += 1 + accepted


def check(
    plan: StepPlan,
    kept: dict[str, int],
    scheduled: dict[str, int],
    requests: dict[str, Any],
    *,
    is_fixed: bool,
) -> None:
    """Compare a plan with one written out."""
    lengths = {}
    for name, count in scheduled.items():
        room = LONGEST - (requests[name].num_computed_tokens + count) - 2
        lengths[name] = max(0, min(kept[name], room, K))
    could = is_fixed or any(
        can_use_drafts(requests[name], requests[name].num_computed_tokens + count)
        for name, count in scheduled.items()
    )
    length = max(lengths.values()) * could
    assert (plan.any_eligible, plan.length, plan.runs_block) == (could, length, length > 0)
    assert (plan.lengths or dict.fromkeys(lengths, length)) == (
        lengths if could else dict.fromkeys(lengths, 0)
    )


def test_who_can_use_drafts() -> None:
    """Requests that get three more tokens at least: the step's, a draft and the bonus token."""
    assert not can_use_drafts(None, 100)
    assert [can_use_drafts(request(left=left), 101) for left in (2, 3)] == [False, True]
    assert not can_use_drafts(request(), 100)  # a token of its prompt is left
    grown = SimpleNamespace(**{**vars(request(left=9)), "num_tokens": 101 + 6})
    assert tokens_left(grown) == 3


def test_requests_are_looked_at_again_after_a_step_that_did_not_repeat_the_plan() -> None:
    """Such as an experiment: it has added tokens, too."""
    cache, requests = cache_of({"a": 5}), Requests(a=request())
    first = cache.repeat(rows("a"), requests)
    cache.expire()
    assert cache.repeat(rows("a"), requests) == first
    assert requests.asked == 2
