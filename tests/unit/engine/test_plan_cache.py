"""Plans that steps repeat, against plans worked out anew for each step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from support.bare_scheduler import request
from vllm_dflash.engine.v2.exchange import StepPlan
from vllm_dflash.engine.v2.plan_cache import PlanCache, can_use_drafts

LONGEST, K = 4096, 7


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


def test_the_same_name_may_be_another_request() -> None:
    """Or have a longer prompt: a session goes on, with a text that takes many steps to read."""
    cache, requests = cache_of({"a": 5}), Requests(a=request())
    assert cache.repeat(rows("a"), requests).any_eligible
    requests["a"] = SimpleNamespace(
        **{**vars(request(0)), "num_tokens": 3000, "num_prompt_tokens": 3000}
    )
    assert not cache.repeat(rows("a", 500), requests).any_eligible


BATCHES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=4)
"""How far each request is from the longest context, and from its last token."""
OWN_LIMITS = st.dictionaries(st.sampled_from("0123"), st.integers(0, K), max_size=2)


@settings(max_examples=2 * settings().max_examples)
@given(BATCHES, OWN_LIMITS, st.booleans(), st.booleans(), st.integers(0, 2**32 - 1))
def test_repeated_plans_are_those_made_anew(
    batch: list[tuple[int, int]], own: dict[str, int], is_fixed: bool, is_ahead: bool, seed: int
) -> None:
    """However many drafts are accepted, near the models' longest context and near the last token;
    also if the batch changes, if another plan is kept, and after an experiment. `is_ahead`: a step
    is scheduled before the last one's tokens are known."""
    random = np.random.default_rng(seed)

    def some() -> list[str]:
        count = random.integers(1, len(batch), endpoint=True)
        return [str(number) for number in random.permutation(len(batch))[:count]]

    def new_lengths() -> dict[str, int]:
        return {name: int(random.integers(0, K, endpoint=True)) for name in some()}

    requests = {
        str(number): request(LONGEST - room, left=left) for number, (room, left) in enumerate(batch)
    }
    running, lengths = [*requests], new_lengths()
    kept = cache_of(lengths, own, is_fixed=is_fixed)
    planned, waiting = dict.fromkeys(requests, 0), list[dict[str, int]]()
    for _ in range(20):
        other_batch, other_plan, experiment = random.random(3) < 0.15
        if other_batch:
            running = some()
        if other_plan:
            lengths = new_lengths()
            kept.keep_plan(lengths, runs_block=True)
        if experiment:
            kept.expire()
        scheduled = {name: 1 + planned[name] for name in running}
        plan = kept.repeat(scheduled, requests)
        check(plan, lengths, scheduled, requests, own, is_fixed=is_fixed)
        for name, count in scheduled.items():
            requests[name].num_computed_tokens += count
        waiting.append({name: planned[name] for name in running})
        planned |= plan.lengths or dict.fromkeys(running, plan.length)
        if len(waiting) > is_ahead:  # some of its drafts are rejected
            for name, drafts in waiting.pop(0).items():
                accepted = int(random.integers(0, drafts, endpoint=True))
                requests[name].num_computed_tokens -= drafts - accepted
                requests[name].num_tokens += 1 + accepted


def check(
    plan: StepPlan,
    kept: dict[str, int],
    scheduled: dict[str, int],
    requests: dict[str, Any],
    own: dict[str, int],
    *,
    is_fixed: bool,
) -> None:
    """Compare a plan with one written out. New requests get the longest length. Requests can use
    drafts that get three more tokens: the step's, a draft and the bonus token."""
    lengths, could = {}, is_fixed
    for name, count in scheduled.items():
        it = requests[name]
        context = it.num_computed_tokens + count
        limits = kept.get(name, max(kept.values())), LONGEST - context - 2, own.get(name, K)
        lengths[name] = max(0, min(limits))
        left = it.num_prompt_tokens + it.max_tokens - it.num_tokens
        could |= context >= it.num_tokens and left > 2 and own.get(name, K) > 0
    length = max(lengths.values()) * could
    assert (plan.any_eligible, plan.length, plan.runs_block) == (could, length, length > 0)
    assert (plan.lengths or dict.fromkeys(lengths, length)) == (
        lengths if could else dict.fromkeys(lengths, 0)
    )
    assert not plan.is_new


def test_a_plan_without_blocks_is_repeated_without() -> None:
    cache = cache_of({"a": 2}, runs_block=False)
    assert cache.repeat(rows("a"), Requests(a=request())) == StepPlan(length=2, is_new=False)


def test_a_request_that_is_gone_can_use_nothing() -> None:
    assert not cache_of({"x": 5}).repeat(rows("x"), Requests()).any_eligible
    assert not can_use_drafts(None, 100)
