"""What is counted of steps, and the line in the log that comes of it."""

from types import SimpleNamespace

import numpy as np
import pytest

from vllm_dflash.engine.figures import FIGURES
from vllm_dflash.engine.periodic_log import PeriodicLog
from vllm_dflash.engine.statistics import DraftStatistics
from vllm_dflash.planning.costs import StepEstimate
from vllm_dflash.planning.step import Plan, Step


def test_statistics_count_what_was_verified() -> None:
    statistics = DraftStatistics(7)
    step = Step("abcd", np.array([4, 1, 1, 0]))
    step.verified = np.array([7, 0, 3, 5])  # the last one's sample was discarded
    statistics.observe_verification(step)
    counted = SimpleNamespace(**statistics.to_dict())
    assert (counted.draft_tokens, counted.accepted_tokens) == (10, 3)
    assert counted.mean_acceptance_length == 1 + 3 / 2
    assert counted.mean_draft_length == 10 / 2


def statistics_of_a_step() -> DraftStatistics:
    """Two requests of two drafts each, of which the first's are accepted, and a draft."""
    statistics = DraftStatistics(3)
    step = Step("abc", np.array([3, 1, 1]), rows=7, could_draft=True)
    step.verified = np.array([2, 2, 0])
    step.plan = Plan(np.array([True, True, False]), width=3, price=1.0, speedup=1.5)
    step.lengths = np.array([2, 0, 0])
    step.draft_rows, step.draft_seconds = 8, 0.01
    step.target_seconds, step.seconds = 0.04, 0.05
    step.planning_seconds, step.nan_drafts = 0.005, 1
    statistics.observe_verification(step)
    statistics.observe(step, StepEstimate(0.03, 0.012, 0.0, 0.025))
    return statistics


def test_statistics_compare_what_was_expected_with_what_came() -> None:
    statistics = statistics_of_a_step()
    for could_draft in (True, False):
        step = Step("abc", np.ones(3, dtype=int), rows=3, could_draft=could_draft)
        statistics.observe(step, None)
    counted = statistics.to_dict()
    assert (counted["steps"], counted["drafted_steps"], counted["skipped_steps"]) == (3, 1, 1)
    assert counted["draft_lengths"] == [1, 0, 1, 0]  # the third was not drafted
    assert counted["nan_drafts"] == 1
    assert counted["costs_ms"]["step"] == {"estimated": 30.0, "measured": 40.0}
    assert counted["costs_ms"]["draft"] == {"estimated": 12.0, "measured": 10.0}
    # In 50 ms, plain decoding makes 3 tokens of 25 ms each twice.
    assert counted["measured_speedup"] == pytest.approx(5 / 6)
    assert counted["predicted_speedup"] == pytest.approx(1.5)
    assert counted["planning_share"] == pytest.approx(0.1)


def test_figures_are_sums_whose_ratios_say_something() -> None:
    figures = statistics_of_a_step().figures()
    assert figures == pytest.approx(
        {
            "drafted_steps": 1,
            "skipped_steps": 0,
            "drafted_requests": 2,
            "planned_tokens": 2,
            "step_seconds": 0.05,
            "planning_seconds": 0.005,
            "produced_tokens": 5,
            "expected_tokens": 9,
            "plain_tokens": 6,
        }
    )
    assert figures.keys() == FIGURES.keys()


@pytest.mark.parametrize(("length", "requests", "tokens"), [(3, 2, 6), (0, 0, 0)])
def test_one_length_for_all(length: int, requests: int, tokens: int) -> None:
    statistics = DraftStatistics(3)
    statistics.observe_uniform(length, 2)
    figures = statistics.figures()
    assert (figures["drafted_requests"], figures["planned_tokens"]) == (requests, tokens)
    assert (figures["drafted_steps"], figures["skipped_steps"]) == (length > 0, length == 0)


def test_the_log_line_comes_every_so_often_and_covers_what_is_new() -> None:
    lines: list[str] = []
    now = SimpleNamespace(seconds=0.0)
    statistics = DraftStatistics(3)
    log = PeriodicLog(
        statistics, 10.0, lambda text, *values: lines.append(text % values), lambda: now.seconds
    )
    log.tick()
    now.seconds = 11.0
    log.tick()
    assert not lines  # nothing happened
    fresh = statistics_of_a_step()
    vars(statistics).update(vars(fresh))
    now.seconds = 15.0
    log.tick()
    assert not lines
    now.seconds = 22.0
    log.tick()
    assert lines == [
        "DFlash planner: Drafted steps: 100%, Mean draft length: 2.00, Mean acceptance length:"
        " 2.00, Step: 40.0 ms (estimated 30.0 ms), Speed against plain decoding, by the cost"
        " model: 0.83x (predicted 1.50x)"
    ]
    now.seconds = 40.0
    log.tick()
    assert len(lines) == 1
