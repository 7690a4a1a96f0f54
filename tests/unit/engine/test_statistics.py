"""What is counted of steps: every number exactly."""

from typing import Any

import numpy as np
import pytest

from vllm_dflash.engine.reporting.figures import FIGURES
from vllm_dflash.engine.reporting.statistics import CostRecord, DraftStatistics
from vllm_dflash.planning.step import Plan, Step, StepEstimate

NO_TIME = {"estimated": 0.0, "measured": 0.0}
NOTHING = {
    "steps": 0,
    "drafted_steps": 0,
    "skipped_steps": 0,
    "probes": 0,
    "draft_tokens": 0,
    "accepted_tokens": 0,
    "free_verifications": 0,
    "free_draft_tokens": 0,
    "free_accepted_tokens": 0,
    "mean_acceptance_length": 0.0,
    "mean_draft_length": 0.0,
    "draft_lengths": [0, 0, 0, 0],
    "nan_drafts": 0,
    "costs_ms": {"step": NO_TIME, "draft": NO_TIME, "context": NO_TIME},
    "predicted_speedup": 0.0,
    "measured_speedup": 0.0,
    "seconds": {"steps": 0.0, "draft": 0.0, "context": 0.0, "planning": 0.0},
    "planning_share": 0.0,
}


def changed(statistics: DraftStatistics) -> dict[str, Any]:
    """What is not as at the start, but for `seconds`."""
    now = statistics.to_dict()
    assert list(now) == list(NOTHING)
    names = [name for name in now if name != "seconds"]
    return {name: now[name] for name in names if now[name] != NOTHING[name]}


def step_of(plan: Plan | None = None, **changes: Any) -> Step:
    """A plain step of three requests, with `changes`."""
    step = Step("abc", np.ones(3, dtype=int), rows=3, plan=plan or Plan.nothing(3))
    vars(step).update(changes)
    return step


def drafted_step(**changes: Any) -> Step:
    """The first two are drafted; 50 ms, of which 40 the target's, 8 the drafter's."""
    plan = Plan(np.array([True, True, False]), width=3, price=1.0, speedup=1.5)
    numbers = {
        "produced": np.array([3, 1, 1]),
        "verified": np.array([2, 2, 0]),
        "lengths": np.array([2, 0, 3]),  # the third was not drafted, so its length is none
        "could_draft": True,
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


def test_before_anything_happens() -> None:
    assert repr(DraftStatistics(3).to_dict()) == repr(NOTHING)  # plain integers are counts


def test_what_was_verified() -> None:
    statistics = DraftStatistics(3)
    step = Step("abcde", np.array([4, 1, 1, 0, 2]))
    step.verified = np.array([7, 0, 1, 5, 2])  # the fourth one's sample was discarded
    for _ in range(2):
        statistics.observe_verification(step)
    assert statistics.verifications == 6
    assert changed(statistics) == {
        "draft_tokens": 20,
        "accepted_tokens": 8,
        "mean_acceptance_length": pytest.approx(1 + 8 / 6),
        "mean_draft_length": pytest.approx(20 / 6),
    }


def test_drafts_from_texts_are_counted_with_the_others_and_by_themselves() -> None:
    statistics = DraftStatistics(3)
    step = Step("abcde", np.array([4, 1, 1, 0, 2]))
    step.verified = np.array([7, 3, 1, 5, 2])
    step.verified_free = np.array([7, 3, 0, 5, 0])  # the fourth one's sample was discarded
    for _ in range(2):
        statistics.observe_verification(step)
    assert statistics.verifications == 8
    assert changed(statistics) == {
        "draft_tokens": 26,
        "accepted_tokens": 8,
        "free_verifications": 4,
        "free_draft_tokens": 20,
        "free_accepted_tokens": 6,
        "mean_acceptance_length": 2.0,
        "mean_draft_length": pytest.approx(26 / 8),
    }


def test_lengths_are_those_of_blocks() -> None:
    """A request that was drafted, but took what its text predicts, had none of its block."""
    statistics = DraftStatistics(3)
    taken = {"lengths": np.array([30, 2, 12]), "from_text": np.array([True, False, True])}
    statistics.observe(drafted_step(**taken), None)
    free = Plan.nothing(3, uses_text=True)
    statistics.observe(step_of(free, lengths=np.array([30, 0, 0]), could_draft=True), None)
    assert statistics.to_dict()["draft_lengths"] == [1, 0, 1, 0]
    assert (statistics.drafted_steps, statistics.skipped_steps) == (1, 1)


def test_figures_are_sums_whose_ratios_say_something() -> None:
    statistics = DraftStatistics(3)
    step = drafted_step(verified_free=np.array([2, 0, 0]))
    statistics.observe_verification(step)
    statistics.observe(step, StepEstimate(0.03, 0.012, 0.004, plain_seconds=0.025))
    figures = statistics.figures()
    assert figures == pytest.approx(
        {
            "drafted_steps": 1,
            "skipped_steps": 0,
            "drafted_requests": 2,
            "planned_tokens": 2,
            "free_draft_tokens": 2,
            "free_accepted_tokens": 2,
            "step_seconds": 0.05,
            "planning_seconds": 0.005,
            "produced_tokens": 5,
            "expected_tokens": 9,
            "plain_tokens": 6,
        }
    )
    assert figures.keys() == FIGURES.keys()


@pytest.mark.parametrize(("length", "requests", "tokens"), [(3, 2, 6), (0, 0, 0)])
def test_figures_of_one_length_for_all(length: int, requests: int, tokens: int) -> None:
    statistics = DraftStatistics(3)
    statistics.observe_uniform(length, 2)
    figures = statistics.figures()
    assert (figures["drafted_requests"], figures["planned_tokens"]) == (requests, tokens)
    assert (figures["drafted_steps"], figures["skipped_steps"]) == (length > 0, length == 0)


def test_a_step_of_uniform_length() -> None:
    statistics = DraftStatistics(3)
    for length, requests in ((1, 5), (0, 4), (3, 1), (1, 3)):
        statistics.observe_uniform(length, requests)
    counts = {"steps": 4, "drafted_steps": 3, "skipped_steps": 1, "draft_lengths": [0, 8, 0, 1]}
    assert changed(statistics) == counts


@pytest.mark.parametrize(
    ("step", "counted"),
    [
        (step_of(), {}),
        (step_of(could_draft=True), {"skipped_steps": 1}),
        (step_of(nan_drafts=2), {"nan_drafts": 2}),
        (step_of(seconds=2.0, planning_seconds=0.5), {"planning_share": 0.25}),
        (step_of(planning_seconds=0.5), {}),  # of a pause: no share of anything
        (
            drafted_step(),
            {
                "drafted_steps": 1,
                "draft_lengths": [1, 0, 1, 0],
                "nan_drafts": 4,
                "planning_share": pytest.approx(0.1),
            },
        ),
        (
            step_of(Plan(np.array([True, False, True]), 1, 1.0, 1.0, is_probe=True)),
            {"drafted_steps": 1, "probes": 1, "draft_lengths": [2, 0, 0, 0]},
        ),
    ],
)
def test_a_step_without_an_estimate(step: Step, counted: dict[str, Any]) -> None:
    statistics = DraftStatistics(3)
    statistics.observe(step, None)
    assert changed(statistics) == {"steps": 1, **counted}


def test_steps_add_up() -> None:
    statistics = DraftStatistics(3)
    for _ in range(3):
        statistics.observe(drafted_step(), None)
        statistics.observe(step_of(could_draft=True, seconds=0.1), None)
        probe = Plan(np.array([False, False, True]), 1, 1.0, 1.0, is_probe=True)
        statistics.observe(step_of(probe), None)
    assert changed(statistics) == {
        "steps": 9,
        "drafted_steps": 6,
        "skipped_steps": 3,
        "probes": 3,
        "draft_lengths": [6, 0, 3, 0],
        "nan_drafts": 12,
        "planning_share": pytest.approx(0.015 / 0.45),
    }


def test_what_was_expected_against_what_came() -> None:
    statistics = DraftStatistics(3)
    statistics.observe(drafted_step(), StepEstimate(0.03, 0.012, 0.004, plain_seconds=0.025))
    assert statistics.to_dict()["costs_ms"] == {
        "step": {"estimated": 30.0, "measured": 40.0},
        "draft": {"estimated": 12.0, "measured": 8.0},
        "context": {"estimated": 4.0, "measured": 2.0},
    }
    # In 50 ms, plain decoding makes 3 tokens in 25 ms twice; this made 5.
    assert statistics.plain_tokens == pytest.approx(6)
    assert statistics.produced_tokens == 5
    assert statistics.to_dict()["predicted_speedup"] == pytest.approx(1.5)
    assert statistics.to_dict()["measured_speedup"] == pytest.approx(5 / 6)


def test_a_step_that_stands_for_several() -> None:
    """Its times are means, and each of them counts."""
    statistics = DraftStatistics(3)
    estimate = StepEstimate(0.02, 0.5, 0.5, plain_seconds=0.02)
    statistics.observe(step_of(target_seconds=0.025, count=4), estimate)
    statistics.observe(step_of(target_seconds=0.05), estimate)
    assert statistics.to_dict()["costs_ms"] == {
        "step": {"estimated": 20.0, "measured": 30.0},  # of five
        "draft": NO_TIME,  # none ran
        "context": NO_TIME,
    }
    assert statistics.costs["step"].count == 5
    assert statistics.plain_tokens == pytest.approx(4 * 3 * 1.25 + 3 * 2.5)
    assert statistics.predicted_tokens == pytest.approx(22.5)
    assert statistics.produced_tokens == 15


def test_a_record_of_costs_gives_means_in_milliseconds() -> None:
    record = CostRecord()
    record.add(0.001, 0.002)
    record.add(0.0040004, 0.0050006, times=3)
    assert record.count == 4
    assert record.to_dict() == {"estimated": 3.25, "measured": 4.25}
    record.add(0.0, 1e-6)
    assert record.to_dict() == {"estimated": 2.6, "measured": 3.401}


def test_seconds_add_up_by_what_they_were_spent_on() -> None:
    statistics = DraftStatistics(3)
    for _ in range(2):
        statistics.observe(drafted_step(), None)
    expected = {"steps": 0.1, "draft": 0.016, "context": 0.004, "planning": 0.01}
    assert statistics.to_dict()["seconds"] == pytest.approx(expected)
