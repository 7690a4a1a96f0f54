"""What is counted for steps, with exact numbers."""

from typing import Any

import numpy as np
import pytest

from vllm_dflash.engine.reporting.statistics import COUNTERS, DraftStatistics
from vllm_dflash.planning.step import Plan, StepRecord

NOTHING = {
    **dict.fromkeys(COUNTERS, 0),
    "mean_acceptance_length": 0.0,
    "mean_draft_length": 0.0,
    "draft_lengths": [0, 0, 0, 0],
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
    plan = Plan(np.array([True, False, True]), width=3, utility_per_second=1.0)
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


TEXTS: dict[str, Any] = {
    "lengths": np.array([30, 12, 2]),
    "from_text": np.array([True, True, False]),
}


def test_drafts_from_texts_are_counted_with_the_others_and_by_themselves() -> None:
    statistics = DraftStatistics(3)
    step = StepRecord("abcdef", np.array([4, 1, 1, 0, 2, 1]))
    step.verified = np.array([7, 3, 1, 5, 2, 0])
    step.verified_free = np.array([7, 3, 0, 5, 0, 0])  # the fourth's sample was discarded
    for _ in range(2):
        statistics.record_outcomes(step)
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
        (step_of(Plan.without_block(3, is_probe=True), any_eligible=True), {"skipped_steps": 1}),
        # Lengths are those of blocks: one took what its text predicts, or all did without a block.
        (
            drafted_step(**TEXTS, nan_drafts=0, planning_seconds=0),
            {
                "drafted_steps": 1,
                "drafted_requests": 2,
                "planned_tokens": 2,
                "draft_lengths": [1, 0, 1, 0],
            },
        ),
        (step_of(any_eligible=True, **TEXTS), {"skipped_steps": 1}),
    ],
)
def test_what_a_step_adds(step: StepRecord, counted: dict[str, Any]) -> None:
    statistics = DraftStatistics(3)
    statistics.record_step(step)
    assert changed(statistics) == {"steps": 1, **counted}
