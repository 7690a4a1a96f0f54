"""What is counted for steps, with exact numbers."""

from typing import Any

import numpy as np
import pytest

from vllm_dflash.engine.reporting.statistics import COUNTERS, DraftStatistics
from vllm_dflash.planning.step import Plan, StepEstimate, StepRecord

NO_TIME = {"estimated": 0.0, "measured": 0.0}
NOTHING = {
    **dict.fromkeys(COUNTERS, 0),
    "mean_acceptance_length": 0.0,
    "mean_draft_length": 0.0,
    "draft_lengths": [0, 0, 0, 0],
    "costs_ms": {"step": NO_TIME, "draft": NO_TIME, "context": NO_TIME},
    "predicted_speedup": 0.0,
    "measured_speedup": 0.0,
    "planning_share": 0.0,
}


def changed(statistics: DraftStatistics) -> dict[str, Any]:
    """Entries that differ from the start, except seconds."""
    now = statistics.to_dict()
    assert list(now) == list(NOTHING)
    names = [name for name in now if "seconds" not in name]
    return {name: now[name] for name in names if now[name] != NOTHING[name]}


def step_of(plan: Plan | None = None, **changes: Any) -> StepRecord:
    """A plain step of three requests, with `changes`."""
    step = StepRecord("abc", np.ones(3, dtype=int), rows=3, plan=plan or Plan.without_block(3))
    vars(step).update(changes)
    return step


def drafted_step(**changes: Any) -> StepRecord:
    """The first and last are drafted. 50 ms, of which the target takes 40 and the drafter 8."""
    plan = Plan(np.array([True, False, True]), width=3, utility_per_second=1.0, speedup=1.5)
    numbers = {
        "produced": np.array([3, 1, 1]),
        "verified": np.array([2, 2, 0]),
        "lengths": np.array([2, 3, 0]),  # the second was not drafted, so its length does not count
        "any_eligible": True,
        "draft_rows": 8,
        "draft_seconds": 0.008,
        "context_rows": 5,
        "context_seconds": 0.002,
        "target_seconds": 0.04,
        "seconds": 0.05,
        "planning_seconds": 0.005,
        "nan_drafts": 4,
    }
    return step_of(plan, **(numbers | changes))


def test_drafts_from_texts_are_counted_with_the_others_and_by_themselves() -> None:
    statistics = DraftStatistics(3)
    step = StepRecord("abcdef", np.array([4, 1, 1, 0, 2, 1]))
    step.verified = np.array([7, 3, 1, 5, 2, 0])
    step.verified_free = np.array([7, 3, 0, 5, 0, 0])  # the fourth's sample was discarded
    for _ in range(2):
        statistics.count_verification(step)
    assert changed(statistics) == {
        "verifications": 8,
        "draft_tokens": 26,
        "accepted_tokens": 8,
        "free_verifications": 4,
        "free_draft_tokens": 20,
        "free_accepted_tokens": 6,
        "mean_acceptance_length": 2.0,
        "mean_draft_length": pytest.approx(26 / 8),
    }


def test_what_the_device_has_counted_replaces_what_was_known() -> None:
    """Since the start: of blocks, and of texts."""
    statistics = DraftStatistics(3)
    for more in (1, 2):
        statistics.take_counts(more * np.array([[1, 7, 2, 5], [3, 20, 9, 0]]))
    assert changed(statistics) == {
        "verifications": 8,
        "draft_tokens": 54,
        "accepted_tokens": 22,
        "free_verifications": 6,
        "free_draft_tokens": 40,
        "free_accepted_tokens": 18,
        "nan_drafts": 10,
        "mean_acceptance_length": 1 + 22 / 8,
        "mean_draft_length": 54 / 8,
    }
    assert all(type(count) is int for count in statistics.counts().values())


def test_lengths_are_those_of_blocks() -> None:
    """A request that was drafted but took what its text predicts has length 0."""
    statistics = DraftStatistics(3)
    taken = {"lengths": np.array([30, 12, 2]), "from_text": np.array([True, True, False])}
    statistics.count_step(drafted_step(**taken), None)
    free = Plan.without_block(3)
    statistics.count_step(step_of(free, lengths=np.array([30, 0, 0]), any_eligible=True), None)
    assert statistics.to_dict()["draft_lengths"] == [1, 0, 1, 0]
    assert (statistics.drafted_steps, statistics.skipped_steps) == (1, 1)


@pytest.mark.parametrize(
    ("step", "counted"),
    [
        (step_of(), {}),
        (step_of(any_eligible=True), {"skipped_steps": 1}),
        (step_of(nan_drafts=2), {"nan_drafts": 2}),
        (step_of(seconds=2.0, planning_seconds=0.5), {"planning_share": 0.25}),
        (step_of(planning_seconds=0.5), {}),  # a pause: there is no time to take a share of
        (
            drafted_step(),
            {
                "drafted_steps": 1,
                "drafted_requests": 2,
                "planned_tokens": 2,
                "draft_lengths": [1, 0, 1, 0],
                "nan_drafts": 4,
                "planning_share": pytest.approx(0.1),
            },
        ),
        (
            step_of(Plan(np.array([True, False, True]), 1, is_probe=True)),
            {"drafted_steps": 1, "probes": 1, "drafted_requests": 2, "draft_lengths": [2, 0, 0, 0]},
        ),
        (
            step_of(Plan.without_block(3, is_probe=True), any_eligible=True),
            {"skipped_steps": 1},
        ),
    ],
)
def test_a_step_without_an_estimate(step: StepRecord, counted: dict[str, Any]) -> None:
    statistics = DraftStatistics(3)
    statistics.count_step(step, None)
    assert changed(statistics) == {"steps": 1, **counted}


def test_what_was_expected_against_what_came() -> None:
    statistics = DraftStatistics(3)
    statistics.count_step(drafted_step(), StepEstimate(0.03, 0.012, 0.004, plain_seconds=0.025))
    assert statistics.to_dict()["costs_ms"] == {
        "step": {"estimated": 30.0, "measured": 40.0},
        "draft": {"estimated": 12.0, "measured": 8.0},
        "context": {"estimated": 4.0, "measured": 2.0},
    }
    # In 50 ms, plain decoding makes 2 x 3 tokens, 3 in 25 ms; this step made 5.
    assert statistics.plain_tokens == pytest.approx(6)
    assert statistics.produced_tokens == 5
    assert statistics.to_dict()["predicted_speedup"] == pytest.approx(1.5)
    assert statistics.to_dict()["measured_speedup"] == pytest.approx(5 / 6)


def test_a_step_that_stands_for_several() -> None:
    """Its times are means, and each of those steps counts."""
    statistics = DraftStatistics(3)
    estimate = StepEstimate(0.02, 0.5, 0.5, plain_seconds=0.02)
    statistics.count_step(step_of(target_seconds=0.025, count=4), estimate)
    statistics.count_step(step_of(target_seconds=0.05), estimate)
    assert statistics.to_dict()["costs_ms"] == {
        "step": {"estimated": 20.0, "measured": 30.0},  # mean of five
        "draft": NO_TIME,  # none ran
        "context": NO_TIME,
    }
    assert statistics.costs[0, 0] == 5
    assert statistics.plain_tokens == pytest.approx(4 * 3 * 1.25 + 3 * 2.5)
    assert statistics.expected_tokens == pytest.approx(22.5)
    assert statistics.produced_tokens == 15
