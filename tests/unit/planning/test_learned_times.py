"""The cost model, and how measurements move it, with numbers worked out by hand."""

from typing import Any

import numpy as np
import pytest

from support.levels import Level, correct, estimate_of
from support.planner_world import curve, names, profiled_costs, straight_costs
from vllm_dflash.planning.costs import StepCosts
from vllm_dflash.planning.step import StepRecord


def test_a_curve_interpolates_and_goes_on_with_its_last_slope() -> None:
    line = curve({1: 10.0, 3: 20.0, 5: 40.0})
    assert line.at(np.array([1, 2, 3, 4, 7])) * 1000 == pytest.approx([10, 15, 20, 30, 60])


def test_a_profile_that_dips_is_made_non_decreasing() -> None:
    assert curve({1: 10.0, 2: 9.0, 4: 12.0}).at(np.array([1, 2, 4])) * 1000 == pytest.approx(
        [10, 10, 12]
    )


@pytest.mark.parametrize(
    ("count", "ms", "rate", "expected"),
    [
        # 20 ms were expected for 4 rows. A tenth of the surprise there, 15% of that an octave away.
        (4, 24.0, 0.1, [10.03, 10.03, 20.4, 40.12]),
        (4, 18.0, 0.1, [9.985, 9.985, 19.8, 39.94]),
        # A surprise is limited to three tenths.
        (4, 26.0, 0.1, [10.045, 10.045, 20.6, 40.18]),
        (4, 9000.0, 0.1, [10.045, 10.045, 20.6, 40.18]),
        (4, 0.0, 0.1, [9.955, 9.955, 19.4, 39.82]),
        # A smaller surprise, at twice the rate.
        (4, 20.5, 0.2, [10.0075, 10.0075, 20.1, 40.03]),
        # Half-way between two points, both get all of it: 2.83 rows, 14.14 ms, 30% more.
        (8**0.5, 18.38477631, 0.1, [10.045, 10.3, 20.6, 40.18]),
        # 3 rows, 15 ms: 4 is 0.17 octaves nearer than 2.
        (3, 18.0, 0.1, [10.03, 10.16601, 20.4, 40.12]),
        # Beyond the end, the last point is the nearest.
        (16, 88.0, 0.1, [10.015, 10.015, 20.03, 40.4]),
        # Less than half a row counts as half a row.
        (0, 11.0, 0.1, [10.1, 10.1, 20.03, 40.06]),
        # A point that would make the curve dip is raised to the one before it.
        (8, 4.0, 1.0, [9.55, 9.55, 19.1, 28.0]),
    ],
)
def test_a_curve_moves_towards_a_measurement(
    count: float, ms: float, rate: float, expected: list[float]
) -> None:
    line = curve({1: 10.0, 2: 10.0, 4: 20.0, 8: 40.0})
    correct(line, count, ms / 1000, rate)
    assert line.seconds * 1000 == pytest.approx(expected, rel=1e-5)


def test_a_curve_never_comes_to_dip() -> None:
    line = curve({1: 10.0, 2: 10.0})
    correct(line, 2, 0.005, 0.5)
    assert line.seconds * 1000 == pytest.approx([9.775, 9.775])


@pytest.mark.parametrize("points", [{0: 0.0, 4: 0.0}, {0: 0.0, 4: 8.0}])
def test_what_takes_no_time_cannot_be_wrong_by_a_share_of_it(points: dict[int, float]) -> None:
    line = curve(points)
    correct(line, 0, 1.0, 0.1)
    assert line.seconds * 1000 == pytest.approx(list(points.values()))


def test_a_count_of_zero_is_an_octave_from_one() -> None:
    line = curve({0: 10.0, 1: 20.0})
    correct(line, 1, 0.022, 0.1)
    assert line.seconds * 1000 == pytest.approx([10.015, 20.2])


@pytest.mark.parametrize(
    ("max_requests", "measured", "ms"),
    [
        # The first step counts in full, and is all that is known.
        (8, [(4, 8.0, 1)], [8, 8, 8, 8]),
        # The second step counts half, the third a third.
        (8, [(4, 8.0, 1), (4, 2.0, 1)], [9, 9, 9, 9]),
        (8, [(4, 8.0, 1), (4, 2.0, 1), (4, 3.0, 1)], [10, 10, 10, 10]),
        # From the seventh step on, each counts 15%.
        (8, [(4, 8.0, 7), (4, 1.0, 1)], [8.15] * 4),
        (8, [(4, 8.0, 70), (4, 1.0, 2)], [8 + (1 - 0.85**2)] * 4),
        # Three steps at once after one count three quarters.
        (8, [(4, 8.0, 1), (4, 4.0, 3)], [11] * 4),
        # Between two points, each gets its share.
        (8, [(6, 8.0, 1)], [8 * 0.4150375, 8 * 0.4150375, 8 * 0.4150375, 8 * 0.5849625]),
        # Each point follows the nearest one seen; in the middle of two, it follows the smaller.
        (8, [(2, 4.0, 1), (8, 2.0, 1)], [4, 4, 4, 6]),
        (16, [(1, 4.0, 1), (16, 2.0, 1), (16, 1.0, 1)], [4, 4, 4, 6.5, 6.5]),
        (1, [(1, 5.0, 1)], [5, 5]),
        (5, [(5, 0.0, 1)], [0, 0, 0, 0]),
    ],
)
def test_a_level_is_what_steps_of_so_many_requests_took_longer(
    max_requests: int, measured: list[tuple[int, float, int]], ms: list[float]
) -> None:
    level = Level.fresh(max_requests)
    for num_requests, surprise, num_steps in measured:
        level.correct(num_requests, surprise / 1000, num_steps)
    counts = [2**octave for octave in range(len(ms))]
    assert [1000 * level.at(count) for count in counts] == pytest.approx(ms)
    assert level.at(2 * counts[-1]) == pytest.approx(ms[-1] / 1000)


def test_a_level_is_linear_between_powers_of_two() -> None:
    level = Level.fresh(4)
    assert [level.at(count) for count in (1, 3, 4)] == [0.0, 0.0, 0.0]
    level.correct(2, 0.004, 1)
    level.correct(4, 0.004, 1)
    assert level.at(3) == pytest.approx(0.004 + 0.004 * 0.5849625)


def timed(num_requests: int, rows: int, ms: float, **more: Any) -> StepRecord:
    ones = np.ones(num_requests, dtype=int)
    return StepRecord(names(num_requests), ones, rows, target_seconds=ms / 1000, **more)


def test_a_steps_estimate_has_four_parts() -> None:
    costs = straight_costs()
    Level(costs).correct(4, 0.003, 1)
    Level(costs, "verify_level").correct(4, 0.002, 1)
    drafted = estimate_of(costs, timed(4, 10, 0.0, draft_rows=6, context_rows=16))
    # 10 + 10 + 3 + 2 ms; (2 + 6) / 4, (4 + 16) / 20, and 10 + 4 + 3.
    assert drafted.target_seconds == pytest.approx(0.025)
    assert drafted.draft_seconds == pytest.approx(0.002)
    assert drafted.context_seconds == pytest.approx(0.001)
    assert drafted.plain_seconds == pytest.approx(0.017)
    plain = estimate_of(costs, timed(4, 4, 0.0))
    assert plain.target_seconds == plain.plain_seconds == pytest.approx(0.017)
    assert (plain.draft_seconds, plain.context_seconds) == (0.0, 0.0)


def test_no_step_takes_less_than_half_its_forward_pass() -> None:
    costs = straight_costs()
    Level(costs).correct(1, -0.007, 1)
    assert costs.decoding(1, np.array([1, 2, 10])) * 1000 == pytest.approx([5.5, 6.0, 13.0])


def test_an_undrafted_step_teaches_the_plain_level_and_the_curve() -> None:
    costs, curve = straight_costs(), straight_costs().verify
    estimate = costs.observe(timed(4, 4, 16.0, count=3))
    assert estimate.target_seconds == pytest.approx(0.014)
    assert Level(costs).at(4) == pytest.approx(0.002)
    assert Level(costs, "verify_level").at(4) == 0.0
    correct(curve, 4, 0.016, 1 - 0.95**3)
    assert costs.verify.seconds == pytest.approx(curve.seconds)
    unmoved = straight_costs()
    assert costs.draft.seconds.tolist() == unmoved.draft.seconds.tolist()
    assert costs.context.seconds.tolist() == unmoved.context.seconds.tolist()


def test_a_drafted_step_teaches_the_verify_level() -> None:
    costs, curve = straight_costs(), straight_costs().verify
    Level(costs).correct(1, 0.002, 1)
    correct(curve, 10, 0.023, 0.05)
    costs.observe(timed(4, 10, 25.0))  # 10 + 10 + 2 ms were expected
    assert Level(costs).at(4) == pytest.approx(0.002)
    assert Level(costs, "verify_level").at(4) == pytest.approx(0.003)
    assert costs.verify.seconds == pytest.approx(curve.seconds)


def test_the_first_undrafted_step_tells_what_drafted_ones_take_beside() -> None:
    """Here 2 ms of the 3 that drafted steps took longer than profiled."""
    costs = straight_costs()
    costs.observe(timed(4, 10, 23.0))
    drafted = float(costs.decoding(4, np.array([10]))[0])
    expected = float(costs.verify.at(4))
    costs.observe(timed(4, 4, 1000 * expected + 2.0))
    assert Level(costs).at(4) == pytest.approx(0.002)
    assert Level(costs, "verify_level").at(4) == pytest.approx(0.001)
    assert float(costs.decoding(4, np.array([10]))[0]) == pytest.approx(drafted, rel=0.01)
    costs.observe(timed(4, 4, 1000 * float(costs.verify.at(4)) + 3.0))
    assert Level(costs, "verify_level").at(4) == pytest.approx(0.001)


def test_several_steps_in_one_record_count_as_several() -> None:
    """The second record stands for three steps, so it is three quarters of what is known."""
    costs = straight_costs()
    costs.observe(timed(4, 4, 14.0))
    costs.observe(timed(4, 4, 16.0, count=3))
    assert Level(costs).at(4) == pytest.approx(0.0015)


@pytest.mark.parametrize(("ms", "level"), [(1000.0, 4.2), (0.0, -7.0)])
def test_no_step_is_longer_by_more_than_three_tenths_but_shorter_by_half(
    ms: float, level: float
) -> None:
    """Interruptions make steps slow; nothing makes them faster than half their forward pass."""
    costs = straight_costs()
    costs.observe(timed(4, 4, ms))
    assert Level(costs).at(4) * 1000 == pytest.approx(level)


def test_draft_and_context_follow_their_measurements() -> None:
    costs, truth = straight_costs(), straight_costs()
    costs.observe(timed(1, 1, 11.0, draft_rows=6, draft_seconds=0.0025))
    correct(truth.draft, 6, 0.0025, 0.15)
    assert costs.draft.seconds == pytest.approx(truth.draft.seconds)
    assert costs.context.seconds == pytest.approx(truth.context.seconds)
    costs.observe(timed(1, 1, 11.0, context_rows=16, context_seconds=0.0008))
    correct(truth.context, 16, 0.0008, 0.15)
    assert costs.context.seconds == pytest.approx(truth.context.seconds)
    assert costs.draft.seconds == pytest.approx(truth.draft.seconds)


def test_prompt_rows_are_learned_at_a_thirty_second_a_step() -> None:
    costs = straight_costs()
    seen = []
    for prompt_rows in (0, 64, 32, 0, 1):
        costs.observe_batch(prompt_rows)
        seen.append([costs.records[name][0] for name in ("prompt_share", "prompt_rows")])
    once, twice = 1 / 32, 63 / 1024
    faded = twice * 31 / 32
    expected = [
        (0, 0),
        (once, 64),
        (twice, 63),
        (faded, 63),
        (1 / 32 + faded * 31 / 32, 63 - 62 / 32),
    ]
    assert np.array(seen) == pytest.approx(np.array(expected))


def shared_with_prompts(share: float, rows: float) -> StepCosts:
    costs = straight_costs()
    costs.records["prompt_share"], costs.records["prompt_rows"] = share, rows
    return costs


def test_decoding_beside_prompts_costs_what_it_adds() -> None:
    """Alone it costs 10 + n ms; beside a prompt n ms, but at least a tenth of the cost alone."""
    costs = shared_with_prompts(0.25, 64)
    alone, added = np.array([11.0, 18.0]), np.array([1.1, 8.0])
    expected = 0.75 * alone + 0.25 * added
    assert costs.decoding(1, np.array([1, 8])) * 1000 == pytest.approx(expected)
    assert costs.plain(8) * 1000 == pytest.approx(expected[1])
    # On a stretch where rows cost more, it costs no more than alone.
    costs.records["verify"] = curve({0: 10.0, 64: 74.0, 128: 714.0}).records
    assert costs.decoding(1, np.array([1, 8])) * 1000 == pytest.approx(
        [0.75 * 11 + 0.25 * 10, 18.0]
    )


def test_prompts_in_one_step_of_a_hundred_do_not_count() -> None:
    alone = straight_costs().decoding(8, np.array([8, 16]))
    assert shared_with_prompts(0.0099, 64).decoding(8, np.array([8, 16])) == pytest.approx(alone)
    shared = shared_with_prompts(0.01, 64).decoding(8, np.array([8, 16]))
    assert shared == pytest.approx(alone - 0.01 * 0.010)


@pytest.mark.parametrize("num_requests", [1, 6, 32])
def test_step_costs_find_what_the_profile_did_not_see(num_requests: int) -> None:
    """Plain steps are 20% slower than profiled, verifying costs 2 ms more, drafting double."""
    costs, truth = profiled_costs(), profiled_costs()
    drafted = num_requests * 3
    plain = 1.2 * float(truth.verify.at(num_requests))
    verify = 1.2 * float(truth.verify.at(drafted)) + 0.002
    draft = 2 * float(truth.draft.at(drafted))
    block: dict[str, Any] = {"draft_rows": drafted, "draft_seconds": draft}
    for _ in range(150):
        costs.observe(timed(num_requests, num_requests, 1000 * plain))
        costs.observe(timed(num_requests, drafted, 1000 * verify, **block))
    estimate = estimate_of(costs, timed(num_requests, drafted, 0.0, **block))
    assert estimate.target_seconds == pytest.approx(verify, rel=0.02)
    assert estimate.draft_seconds == pytest.approx(draft, rel=0.02)
    assert estimate.plain_seconds == pytest.approx(plain, rel=0.02)


@pytest.mark.parametrize("num_requests", [1, 6, 32])
def test_drafts_make_no_step_faster(num_requests: int) -> None:
    """Steps without drafts were measured on a machine that was busy then. Now that drafting seems
    to pay, only steps with drafts are: they tell that the others would not take that long."""
    costs, rows = profiled_costs(), num_requests + 3
    usual = float(costs.verify.at(num_requests)), float(costs.verify.at(rows))
    for _ in range(20):
        costs.observe(timed(num_requests, num_requests, 1000 * usual[0]))
        costs.observe(timed(num_requests, rows, 1000 * usual[1]))
    for _ in range(20):
        costs.observe(timed(num_requests, num_requests, 1500 * usual[0]))
    busy = estimate_of(costs, timed(num_requests, rows, 1000 * usual[1]))
    assert busy.plain_seconds > 1.3 * usual[0]
    for _ in range(25):
        costs.observe(timed(num_requests, rows, 1000 * usual[1]))
    found = estimate_of(costs, timed(num_requests, rows, 1000 * usual[1]))
    assert found.plain_seconds < 1.06 * usual[1]
    assert found.target_seconds == pytest.approx(usual[1], rel=0.03)
    # What verifying itself takes is no reason to think less of it.
    slower = usual[1] + 0.004
    for _ in range(40):
        costs.observe(timed(num_requests, num_requests, 1000 * usual[0]))
        costs.observe(timed(num_requests, rows, 1000 * slower))
    found = estimate_of(costs, timed(num_requests, rows, 1000 * slower))
    assert found.plain_seconds == pytest.approx(usual[0], rel=0.03)
    assert found.target_seconds == pytest.approx(slower, rel=0.03)


@pytest.mark.parametrize("num_requests", [1, 6, 32])
def test_a_profile_that_is_too_steep_says_nothing_about_plain_steps(num_requests: int) -> None:
    """Steps with drafts take less than profiled, and still more than steps without."""
    costs, rows = profiled_costs(), 4 * num_requests
    plain = float(costs.verify.at(num_requests))
    verify = 0.5 * (plain + float(costs.verify.at(rows)))
    for number in range(100):
        if number < 10:
            costs.observe(timed(num_requests, num_requests, 1000 * plain))
        costs.observe(timed(num_requests, rows, 1000 * verify))
        found = estimate_of(costs, timed(num_requests, rows, 1000 * verify))
        assert found.plain_seconds == pytest.approx(plain, rel=0.06)
    assert found.target_seconds == pytest.approx(verify, rel=0.02)
