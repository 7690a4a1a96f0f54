"""What one run has learned and the next one starts from."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from support.chances_by_hand import bias_of_all
from support.planner_world import MAX_DRAFT, World, curve, names, planner, profiled_costs, step_of
from vllm_dflash.planning.ahead import AheadPlanner
from vllm_dflash.planning.chances import CONFIDENCE_KNOTS, RECALLED_TOKENS
from vllm_dflash.planning.costs import StepCosts, num_octaves
from vllm_dflash.planning.estimates import Estimates, EstimatesError
from vllm_dflash.planning.planner import Planner

AMOUNTS = st.floats(0.0, 1e6)
KNOTS = len(CONFIDENCE_KNOTS)


@st.composite
def learned(draw: st.DrawFn, max_draft: int, max_requests: int) -> Estimates:
    """Any estimates that steps can lead to."""
    costs = profiled_costs(max_requests)
    for part in (costs.verify, costs.draft, costs.context):
        part.seconds[:] = np.sort(draw(arrays(np.float64, len(part.seconds), elements=AMOUNTS)))
    costs.verify.seconds[:] += 1e-9  # a step takes some time
    for level in (costs.records["plain_level"], costs.records["verify_level"]):
        shape = level["seconds"].shape
        level["seconds"] = draw(arrays(np.float64, shape, elements=st.floats(-1e6, 1e6)))
        level["seen"] = draw(arrays(np.float64, shape, elements=AMOUNTS))
    costs.records["attention"] = draw(arrays(np.float64, 3, elements=AMOUNTS))
    costs.records["prompt_share"] = draw(st.floats(0.0, 1.0))
    costs.records["prompt_rows"] = draw(AMOUNTS)
    seen = draw(arrays(np.float64, (max_draft, KNOTS), elements=AMOUNTS))
    share = draw(arrays(np.float64, (max_draft, KNOTS), elements=st.floats(0.0, 1.0)))
    bias = draw(arrays(np.float64, 2, elements=AMOUNTS))
    blocks = np.stack([seen, share * seen])
    free = draw(st.integers(0, 3))
    texts = np.ones((2, free, KNOTS)) * np.array([3.0, 1.5])[:, None, None]
    return Estimates(costs, blocks, bias, texts)


def read_again(estimates: Estimates, max_draft: int = MAX_DRAFT, requests: int = 64) -> Estimates:
    written = json.dumps(estimates.to_dict(), allow_nan=False)
    return Estimates.from_dict(json.loads(written), max_draft, requests)


@given(st.data(), st.integers(1, 16), st.integers(1, 300))
def test_to_the_last_digit(data: st.DataObject, max_draft: int, max_requests: int) -> None:
    known = data.draw(learned(max_draft, max_requests))
    read = read_again(known, max_draft, max_requests)
    assert read.to_dict() == known.to_dict()
    assert read.costs.records == known.costs.records
    for rows in (1, 7, 500):
        assert float(read.costs.verify.at(rows)) == float(known.costs.verify.at(rows))


def of_a_run(policy: Planner | None = None, steps: int = 300) -> Planner:
    policy = policy or planner()
    World(policy).run(names(8), steps)
    return policy


def test_what_is_written_stays_what_it_was() -> None:
    """It is written to the file while the next steps run."""
    policy = of_a_run()
    written = policy.estimates().to_dict()
    before = json.dumps(written)
    of_a_run(policy)
    assert json.dumps(written) == before
    assert policy.estimates().to_dict() != written


def first_number(written: Any) -> tuple[Any, int]:
    """The list that holds the first number of nested lists, and its index."""
    while isinstance(written[0], list):
        written = written[0]
    return written, 0


def with_first(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Replaces the first number of a part by a value, for example in `costs.verify.seconds`."""

    def change(written: dict[str, Any]) -> None:
        *path, last = name.split(".")
        for each in path:
            written = written[each]
        if isinstance(written[last], list):
            numbers, place = first_number(written[last])
            numbers[place] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        *(
            with_first(name, value)
            for name in (
                *("blocks", "texts", "bias", "costs.attention", "costs.prompt_share"),
                *(f"costs.{part}.seconds" for part in ("verify", "draft", "context")),
                *(f"costs.{part}.counts" for part in ("verify", "draft", "context")),
                *(f"costs.{part}.num_points" for part in ("verify", "plain_level")),
                *("costs.verify_level.seen", "costs.prompt_rows"),
            )
            for value in (float("nan"), float("inf"), -1.0, "a", None, [1.0])
        ),
        with_first("costs.plain_level.seconds", float("nan")),
        with_first("costs.verify.seconds", 1e9),
        with_first("costs.verify.counts", 1e9),
        lambda written: written["costs"]["draft"]["counts"][0].__setitem__(
            1, written["costs"]["draft"]["counts"][0][0]
        ),
        *(with_first("costs.draft.num_points", count) for count in (0, 1, 65, 1e300)),
        *(with_first("costs.verify_level.num_points", count) for count in (0, 1, 24, 25)),
        with_first("costs.prompt_share", 1.5),
        lambda written: written["blocks"][1][0].__setitem__(0, 1e9),
        lambda written: written["texts"][1][0].__setitem__(0, 1e9),
        lambda written: written.pop("costs"),
        lambda written: written["costs"].pop("draft"),
        lambda written: written.pop("blocks"),
        lambda written: written["blocks"].pop(),
        lambda written: written["blocks"][0].pop(),
        lambda written: written["texts"][0].pop(),
        lambda written: written.update(costs=[]),
        lambda written: written.update(bias=3.0),
    ],
)
def test_what_makes_no_sense_is_refused(change: Callable[[dict[str, Any]], None]) -> None:
    """A compiled function would use it in every step."""
    written = of_a_run(steps=20).estimates().to_dict()
    Estimates.from_dict(written, MAX_DRAFT, 64)
    change(written)
    with pytest.raises(EstimatesError):
        Estimates.from_dict(written, MAX_DRAFT, 64)


@pytest.mark.parametrize("written", [None, [], 3, "text", {}])
def test_what_is_something_else_is_refused(written: Any) -> None:
    with pytest.raises(EstimatesError):
        Estimates.from_dict(written, MAX_DRAFT, 64)


@pytest.mark.parametrize(("max_draft", "max_requests"), [(MAX_DRAFT + 1, 64), (MAX_DRAFT, 128)])
def test_of_an_engine_of_another_size_is_refused(max_draft: int, max_requests: int) -> None:
    with pytest.raises(EstimatesError):
        read_again(planner().estimates(), max_draft, max_requests)


def test_another_runs_prompts_count_for_less() -> None:
    seen = np.full((MAX_DRAFT, KNOTS), 100.0)
    blocks = np.stack([seen, 0.25 * seen])
    texts = np.stack([seen, 0.75 * seen])
    known = Estimates(profiled_costs(), blocks, np.array([8.0, 4.0]), texts)
    policy, ahead = planner(), AheadPlanner(MAX_DRAFT, 64)
    for learner in (policy, ahead):
        learner.recall(known)
    ahead.start(known.costs, range(MAX_DRAFT + 1))
    assert known.blocks[0].sum() > RECALLED_TOKENS
    for learner in (policy, ahead):
        now = learner.estimates()
        assert now.blocks[0].sum() == pytest.approx(RECALLED_TOKENS)
        np.testing.assert_allclose(now.blocks[1], 0.25 * now.blocks[0])
        assert learner.block_chances.rates[0, -1] == pytest.approx(0.27, abs=0.03)
        assert bias_of_all(learner.block_chances) == 0.75
    np.testing.assert_allclose(ahead.text_chances.accepted, 0.75 * ahead.text_chances.seen)
    assert ahead.text_chances.seen.sum() == pytest.approx(RECALLED_TOKENS)
    assert not policy.text_chances.seen.any()  # its texts have other numbers of drafts


def off(verify: float, draft: float) -> StepCosts:
    """A profile that is wrong by these factors."""
    right = profiled_costs()
    right.verify.seconds[:] *= verify
    right.draft.seconds[:] *= draft
    return right


def first_rates(profile: Callable[[], StepCosts]) -> tuple[float, float]:
    """Tokens a second of the first 50 steps, for a planner that starts afresh and one that recalls;
    mean of several engines."""
    rates = []
    for seed in range(6):
        old = Planner(MAX_DRAFT, 64, profile())
        World(old, seed=seed).run(names(8), 600)
        known = read_again(old.estimates())
        recalls = Planner(MAX_DRAFT, 64, known.costs)
        recalls.recall(known)
        each = []
        for policy in (Planner(MAX_DRAFT, 64, profile()), recalls):
            run = World(policy, seed=seed + 100)
            run.run(names(8, first=1000), 50)
            each.append(run.rate)
        rates.append(each)
    cold, recalled = np.mean(rates, axis=0)
    return float(cold), float(recalled)


def test_a_restarted_engine_need_not_learn_again() -> None:
    """If the profile was wrong. It gains 8% here."""
    cold, recalled = first_rates(lambda: off(0.6, 2.0))
    assert recalled > 1.05 * cold
    cold, recalled = first_rates(lambda: off(1.5, 0.5))
    assert recalled > 1.03 * cold


def test_an_engine_that_has_become_slower_learns_that() -> None:
    known = read_again(of_a_run().estimates())
    ahead = AheadPlanner(MAX_DRAFT, 64)
    ahead.start(known.costs, range(MAX_DRAFT + 1))
    before = known.costs.plain(8)
    for _ in range(100):
        step = step_of(names(8), np.zeros(8, dtype=int), np.zeros(8, dtype=int))
        step.target_seconds = 2 * before
        ahead.observe(step, None)
    assert known.costs.plain(8) == pytest.approx(2 * before, rel=0.02)


def test_levels_are_of_the_batch() -> None:
    """They have as many points as `num_octaves` says, and the file is read for that many."""
    for requests in (1, 2, 3, 256):
        known = Planner(3, requests, StepCosts.of(*(curve({1: 1.0, 2: 2.0}),) * 3, requests))
        read = read_again(known.estimates(), 3, requests)
        points = num_octaves(requests)
        assert read.costs.records["plain_level"]["num_points"] == points
