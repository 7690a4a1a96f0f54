"""Plans of Model Runner V2, which the device turns into drafts, and what it learns from these."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.outcomes import outcomes_of
from support.planner_world import names, step_of, straight, straight_costs
from support.told_planner import ToldPlanner, v2
from vllm_dflash.planning.costs import StepCosts
from vllm_dflash.planning.planner import Planner
from vllm_dflash.planning.step import TEXT


def learn(planner: Planner, verified: list[int], accepted: list[int], **more: Any) -> None:
    """Learn from a step of V2's."""
    step = step_of(names(len(verified)), np.array(verified), np.array(accepted))
    planner.learn_outcomes(
        step, outcomes_of(verified, planner.max_draft, accepted=accepted, **more)
    )


def going_on(planner: Planner, times: int = 30) -> None:
    """Learn from steps where one request's text comes true, and the other's predicts nothing."""
    for _ in range(times):
        step = step_of(names(2), np.array([3, 0]), np.array([3, 0]))
        told = outcomes_of(
            [3, 0], 3, source=TEXT, accepted=[3, 0], num_observed=[3, 0], num_correct=[3, 0]
        )
        lengths, matches = np.array([3, 0]), np.array([40, 0])
        planner.learn_outcomes(step, told._replace(text_lengths=lengths, matches=matches))


def test_where_a_text_goes_on_no_block_is_needed() -> None:
    planner = ToldPlanner(0.05, 0.02, 0.01, v2=v2())
    going_on(planner)
    plan = planner.plans([3, 3])
    assert not plan.runs_block
    assert plan.lengths.tolist() == [3, 0]
    assert plan.rate > 1.5 * 2 / 0.012
    # A block runs if it brings more to the other request than it takes.
    planner.blocks.curves[:] = 0.9, 0.8, 0.7
    plan = planner.plans([3, 3])
    assert plan.runs_block
    assert plan.of_blocks == pytest.approx(np.log(1 + 2.4))
    assert np.log(1 + 2.5) < plan.of_texts < np.log(1 + 3)


def test_what_a_match_promised_fades_when_it_has_ended() -> None:
    planner = ToldPlanner(0.05, 0.02, 0.01, v2=v2())
    going_on(planner)
    assert planner.plans([3, 3]).lengths[0] == 3
    for _ in range(30):
        learn(planner, [0, 0], [0, 0])
    assert not planner.plans([3, 3]).lengths.any()


def test_each_kind_of_drafts_learns_from_its_own() -> None:
    planner = ToldPlanner(0.8, 0.6, 0.5, v2=v2())
    learn(planner, [3, 2, 0], [1, 2, 0], confidence=0.7)
    assert planner.blocks.of_all.tolist() == pytest.approx([4 * 0.7, 3])
    assert planner.texts.of_all.tolist() == [0, 0]
    assert planner.ratios_of_blocks(names(1))[0] == planner.blocks.ratio(planner.rows(names(1)))
    told: dict[str, Any] = {
        "matches": 5,
        "lengths": 3,
        "num_observed": [2, 3, 0],
        "num_correct": [1, 2, 0],
    }
    learn(planner, [3, 2, 0], [1, 2, 0], source=TEXT, **told)
    assert planner.blocks.of_all.tolist() == pytest.approx([4 * 0.7, 3])
    expected, failed = planner.texts.of_all
    assert failed == pytest.approx(1), "of the first; both of the second's were right"
    assert expected > 0


def test_of_a_text_beside_other_drafts_only_the_first_token_counts() -> None:
    """How many tokens are known then shows how easy they were."""
    planner = ToldPlanner(0.8, 0.6, 0.5, v2=v2())
    told: dict[str, Any] = {"matches": 5, "lengths": 3, "num_observed": [3], "num_correct": [2]}
    learn(planner, [3], [2], confidence=0.7, **told)
    assert planner.texts.of_all[1] == 0
    told["num_correct"] = [0]
    learn(planner, [3], [2], confidence=0.7, **told)
    assert planner.texts.of_all[1] == 1


def test_what_plans_take_that_were_not_found_here() -> None:
    """Rows and the block, and more if a step's requests have different lengths, or no graph."""
    planner = ToldPlanner(0.9, 0.8, 0.7, v2=v2(3, 7, ragged_seconds=1.0))
    plans = np.array([[3, 3], [7, 7], [7, 3], [5, 5]])
    planner.costs.context = straight(0, 0)
    block = (2 + 2 * 4) / 4000
    expected = [(10 + 2 + sum(plan)) / 1000 + block for plan in plans.tolist()]
    expected = [one + more for one, more in zip(expected, [0.0, 0.0, 1.0, 1.0], strict=True)]
    assert planner.seconds(plans, np.array([10, 10])).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(("draft_rows", "drafting"), [(0, 0.0), (8, 0.0025)])
def test_costs_learn_what_a_step_took_without_the_block_in_it(
    draft_rows: int, drafting: float
) -> None:
    """A step's time includes the block after the step before."""
    planner, costs = ToldPlanner(0.1, 0.1, 0.1, v2=v2()), straight_costs()
    step = step_of(names(2), np.array([0, 0]), np.array([0, 0]))
    step.draft_rows, step.target_seconds = draft_rows, 0.015
    planner.record_step(step)
    alone = step_of(names(2), np.array([0, 0]), np.array([0, 0]))
    alone.target_seconds = 0.015 - drafting
    costs.record_step(alone)
    rows = np.array([2, 4, 8])
    assert planner.costs.target(2, rows) == pytest.approx(costs.target(2, rows))
    assert (step.draft_rows, step.target_seconds) == (draft_rows, 0.015)


def test_a_block_profiled_too_slow_does_not_make_plain_decoding_fast() -> None:
    """Its estimated time is subtracted from steps that were measured with it: what is left for the
    target is too little, and says nothing about steps without drafts."""
    slow = StepCosts(straight(10, 1), straight(5, 0.25), straight(0.2, 0.05), 64)
    planner = ToldPlanner(0.1, 0.1, 0.1, costs=slow, v2=v2())
    plain = planner.costs.plain(2)
    for _ in range(40):
        step = step_of(names(2), np.array([1, 1]), np.array([0, 0]))
        step.draft_rows, step.target_seconds = 8, 0.016  # 4 rows, and 2 ms for the block
        planner.record_step(step)
    assert planner.costs.plain(2) == pytest.approx(plain, rel=0.05)
