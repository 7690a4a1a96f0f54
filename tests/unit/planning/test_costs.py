"""The cost model: interpolation, and learning from measured steps."""

import numpy as np
import pytest

from support.levels import Level, correct, estimate_of
from support.planner_world import VERIFY_MS, curve, profiled_costs
from vllm_dflash.planning.curves import LARGEST_SURPRISE
from vllm_dflash.planning.step import StepRecord


def timed(num_requests: int, rows: int, seconds: float, draft_seconds: float = 0.0) -> StepRecord:
    """A step of so many rows, which drafted as many if `draft_seconds` is given."""
    ids = [str(number) for number in range(num_requests)]
    step = StepRecord(ids, np.ones(num_requests, dtype=int), rows, target_seconds=seconds)
    step.draft_seconds, step.draft_rows = draft_seconds, rows * (draft_seconds > 0)
    return step


def test_a_curve_interpolates_and_goes_on_with_its_last_slope() -> None:
    line = curve({1: 10.0, 3: 20.0, 5: 40.0})
    assert line.at(np.array([1, 2, 3, 4, 7])) * 1000 == pytest.approx([10, 15, 20, 30, 60])


def test_a_profile_that_dips_is_made_non_decreasing() -> None:
    assert curve({1: 10.0, 2: 9.0, 4: 12.0}).at(np.array([1, 2, 4])) * 1000 == pytest.approx(
        [10, 10, 12]
    )


def test_a_curve_follows_measurements_where_they_are_made() -> None:
    line = curve(VERIFY_MS)
    before = line.at(np.array([2, 8, 256]))
    for _ in range(200):
        correct(line, 8, 0.025)
    after = line.at(np.array([2, 8, 256]))
    assert after[1] == pytest.approx(0.025, rel=0.02)
    # A machine that is slower here is slower elsewhere too, but that is known less well.
    assert before[2] < after[2] < before[2] * 25 / 16.9
    assert (np.diff(line.seconds) >= 0).all()


def test_one_interrupted_step_hardly_matters() -> None:
    line = curve(VERIFY_MS)
    expected = float(line.at(8))
    correct(line, 8, 100.0)
    assert float(line.at(8)) < expected * (1 + LARGEST_SURPRISE)
    costs = profiled_costs()
    plain = costs.plain(8)
    for _ in range(20):
        costs.observe(timed(8, 8, plain))
    costs.observe(timed(8, 8, 100.0))
    assert costs.plain(8) < 1.1 * plain


def test_a_level_is_known_at_once_and_spreads_to_where_nothing_was_seen() -> None:
    level = Level.fresh(64)
    level.correct(16, 0.005, num_steps=1)
    assert level.at(16) == pytest.approx(0.005)
    assert level.at(1) == level.at(64) == pytest.approx(0.005)
    level.correct(1, -0.004, num_steps=1)
    assert level.at(1) == pytest.approx(0.001)
    assert level.at(16) == pytest.approx(0.005)


def test_alike_steps_reported_together_count_as_often() -> None:
    one_by_one, together = Level.fresh(8), Level.fresh(8)
    for _ in range(40):
        one_by_one.correct(4, 0.01 - one_by_one.at(4), num_steps=1)
        one_by_one.correct(4, 0.02 - one_by_one.at(4), num_steps=1)
    for _ in range(5):
        together.correct(4, 0.015 - together.at(4), num_steps=16)
    assert together.at(4) == pytest.approx(one_by_one.at(4), rel=0.1)


@pytest.mark.parametrize("num_requests", [1, 6, 32])
def test_step_costs_find_what_the_profile_did_not_see(num_requests: int) -> None:
    """Plain steps are 20% slower than profiled, verifying costs 2 ms more, drafting double."""
    costs, truth = profiled_costs(), profiled_costs()
    drafted = num_requests * 3
    plain = 1.2 * float(truth.verify.at(num_requests))
    verify = 1.2 * float(truth.verify.at(drafted)) + 0.002
    draft = 2 * float(truth.draft.at(drafted))
    for _ in range(150):
        costs.observe(timed(num_requests, num_requests, plain))
        costs.observe(timed(num_requests, drafted, verify, draft))
    estimate = estimate_of(costs, timed(num_requests, drafted, verify, draft))
    assert estimate.target_seconds == pytest.approx(verify, rel=0.02)
    assert estimate.draft_seconds == pytest.approx(draft, rel=0.02)
    assert estimate.plain_seconds == pytest.approx(plain, rel=0.02)


def test_no_step_is_thought_to_take_no_time() -> None:
    costs = profiled_costs()
    for _ in range(50):
        costs.observe(timed(64, 64, 0.0))
    assert (costs.decoding(1, np.array([1, 8])) > 0).all()


def test_steps_shared_with_prompts_leave_less_to_gain() -> None:
    """The prompts then pay for reading the weights, so decoding pays only for its own rows."""
    costs = profiled_costs()
    tokens = np.array([8, 16, 24])
    alone = costs.decoding(8, tokens)
    for _ in range(400):
        costs.observe_batch(64)
    shared = costs.decoding(8, tokens)
    assert shared == pytest.approx(
        profiled_costs().decoding(8, tokens + 64) - costs.verify.at(64), rel=1e-3
    )
    assert (shared < alone).all()
    # Relative to a plain step, verifying costs more than it does alone.
    assert shared[1] / shared[0] > alone[1] / alone[0]
    for _ in range(400):
        costs.observe_batch(0)
    assert costs.decoding(8, tokens) == pytest.approx(alone)


def test_no_decoding_is_thought_to_be_free() -> None:
    """Steps are faster than profiled, and shared with prompts on a flat stretch of the curve."""
    costs = profiled_costs()
    costs.records["verify"] = curve({1: 1.0, 64: 1.0, 128: 1.0}).records
    for _ in range(100):
        costs.observe(timed(8, 8, 0.0001))
        costs.observe_batch(60)
    assert (costs.decoding(8, np.array([8, 16, 64])) > 0).all()
    assert costs.plain(8) > 0
