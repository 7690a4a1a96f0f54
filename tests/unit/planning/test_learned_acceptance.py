"""What becomes of drafts reaches every estimate that a planner uses, exactly once.

Calibration and bias have tests of their own; here, a second pair of them is fed by hand.
"""

import numpy as np
import pytest

from support.chances_by_hand import Bias, Calibration, bias_of_all
from support.levels import Level
from support.planner_world import MAX_DRAFT, World, curve, names, profiled_costs, step_of
from support.told_planner import ToldPlanner, decoding
from vllm_dflash.planning import Floats, Ints
from vllm_dflash.planning.planner import Planner
from vllm_dflash.planning.step import Plan, StepRecord

EVERYTHING = 1e-9
"""Price of time at which every draft is verified."""


def draft(
    ours: ToldPlanner,
    confidence: list[list[float]],
    limits: list[int],
    *,
    price: float = EVERYTHING,
    wanted: int = 0,
    ids: list[str] | None = None,
) -> Ints:
    """Draft for requests with a limit above 0, as the test plans; return how many are verified."""
    step = decoding(limits, ids=ids)
    block = np.array(confidence)
    step.plan = Plan(step.limits > 0, block.shape[1], price=price, speedup=2.0, min_verified=wanted)
    return ours.decide_lengths(step, block)[0]


def verify(
    ours: ToldPlanner, verified: list[int], accepted: list[int], ids: list[str] | None = None
) -> None:
    step = step_of(ids or names(len(verified)), np.array(verified), np.array(accepted))
    step.limits = np.full(len(verified), ours.max_draft)
    ours.plan(step)


@pytest.mark.parametrize(
    ("price", "limits", "wanted", "lengths"),
    [
        # A row costs 1 ms, so a draft's survival must be at least a thousandth of the price.
        (350, [3, 3], 0, [3, 1]),
        (370, [3, 3], 0, [2, 1]),
        (410, [3, 3], 0, [2, 0]),
        (750, [3, 3], 0, [1, 0]),
        (1000, [3, 3], 0, [0, 0]),
        (350, [1, 2], 0, [1, 1]),
        (1000, [3, 1], 2, [2, 1]),
        (350, [3, 3], 2, [3, 2]),
    ],
)
def test_drafts_are_cut_where_they_are_not_worth_their_time(
    price: float, limits: list[int], wanted: int, lengths: list[int]
) -> None:
    """Survival is 0.9, 0.72, 0.36 for one request, and 0.4, 0.04, 0.004 for the other."""
    ours = ToldPlanner(3)
    confidence = [[0.9, 0.8, 0.5], [0.4, 0.1, 0.1]]
    assert draft(ours, confidence, limits, price=price, wanted=wanted).tolist() == lengths


def test_rows_that_others_verify_make_drafts_dearer() -> None:
    """Decoding is charged for the whole batch, starting with its number of requests."""
    ours = ToldPlanner(1)
    # Beyond 4 rows, a row costs a tenth.
    ours.costs.records["verify"] = curve({0: 10.0, 4: 14.0, 14: 15.0}).records
    assert draft(ours, [[0.5]] * 3, [1, 1, 1], price=700).tolist() == [1, 1, 1]
    assert draft(ours, [[0.5]], [1], price=700).tolist() == [0]


def test_what_is_verified_teaches_how_far_confidence_can_be_trusted() -> None:
    """Two of three drafts were verified for the first of three requests, one for the second."""
    ours = ToldPlanner(3)
    confidence = [[0.8, 0.5, 0.3], [0.6, 0.9, 0.9]]
    draft(ours, confidence, [2, 1, 0])
    verify(ours, [2, 1, 0], [0, 1, 0])

    calibration, bias = Calibration(3), Bias(2)
    calibration.observe(np.array(confidence), np.array([2, 1]), np.array([0, 1]))
    bias.observe(np.array([0, 1]), np.array([0.8 + 0.4, 0.6]), np.array([0, 1]))
    assert ours.block_chances.rates == pytest.approx(calibration.rates)
    assert bias_of_all(ours.block_chances) == pytest.approx(bias.of_all())

    again = np.array([[0.7, 0.7], [0.7, 0.2]])
    draft(ours, again.tolist(), [2, 2, 0])
    survival = np.cumprod(calibration.acceptance(again), axis=1)
    expected = survival * bias.of(np.array([0, 1]))[:, None]
    assert ours.forecast.observed[-1][1] == pytest.approx(expected)
    # The expectation for these is the calibrated survival, without the bias.
    verify(ours, [2, 2, 0], [1, 2, 0])
    bias.observe(np.array([0, 1]), survival.sum(axis=1), np.array([1, 2]))
    assert bias_of_all(ours.block_chances) == pytest.approx(bias.of_all())
    calibration.observe(np.pad(again, ((0, 0), (0, 1))), np.array([2, 2]), np.array([1, 2]))
    assert ours.block_chances.rates == pytest.approx(calibration.rates)


def nothing_was_learned(ours: ToldPlanner) -> bool:
    return bool((ours.block_chances.rates == Calibration(ours.max_draft).rates).all()) and (
        bias_of_all(ours.block_chances) == 1.0
    )


def test_drafts_that_are_not_ours_teach_nothing() -> None:
    """vLLM pads a request that it admits or resumes with K placeholders."""
    shortest = ToldPlanner(1)
    verify(shortest, [1, 1], [1, 0])
    assert nothing_was_learned(shortest)
    ours = ToldPlanner(3)
    verify(ours, [3, 0], [0, 0])
    assert nothing_was_learned(ours)
    # Fewer drafts were handed over than are verified here, or none, so these are others.
    assert draft(ours, [[0.9, 0.9, 0.9]], [2, 0]).tolist() == [2, 0]
    verify(ours, [3, 3], [0, 0])
    assert nothing_was_learned(ours)
    assert draft(ours, [[0.9, 0.9, 0.9]], [3, 0], price=2000).tolist() == [0, 0]
    verify(ours, [1, 0], [0, 0])
    assert nothing_was_learned(ours)


def test_drafts_are_verified_once() -> None:
    ours = ToldPlanner(1)
    draft(ours, [[0.5]], [1])
    verify(ours, [1], [1])
    rates = ours.block_chances.rates.copy()
    verify(ours, [1], [1])
    assert (ours.block_chances.rates == rates).all()


def asked(ours: ToldPlanner, ids: list[str]) -> list[float]:
    """Scores that tell requests apart: their recent first survival."""
    ours.plan(decoding([ours.max_draft] * len(ids), ids=ids))
    return ours.forecast.asked[-1]


def test_a_requests_score_follows_its_first_survival_and_fades_to_that_of_all() -> None:
    ours = ToldPlanner(2, mean_first_worth=0.6)
    assert asked(ours, ["a", "b"]) == [0.6, 0.6]
    draft(ours, [[0.9, 0.1]], [0, 2], ids=["a", "b"])
    scores, curves = ours.forecast.observed[-1]
    assert scores.tolist() == [0.6]  # from before the draft
    assert curves.tolist() == pytest.approx(np.array([[0.9, 0.09]]))
    # Half-way to 0.9, and then a twentieth of the way back to the present mean.
    ours.forecast.summary = ours.forecast.summary._replace(mean_first_worth=0.5)
    assert asked(ours, ["a", "b"]) == pytest.approx([0.595, 0.75 - 0.05 * 0.25])
    assert asked(ours, ["b"]) == pytest.approx([0.7375 - 0.05 * 0.2375])
    assert asked(ours, ["a"]) == pytest.approx([0.595 - 0.05 * 0.095])


def test_a_new_request_inherits_nothing_from_whose_row_it_takes() -> None:
    """There are rows for twice the batch. With batches of one, the third takes the first's row."""
    ours = ToldPlanner(1, mean_first_worth=0.5, max_requests=1)
    draft(ours, [[0.9]], [1], ids=["a"])
    verify(ours, [1], [0], ["a"])
    known = asked(ours, ["a"])
    assert known != pytest.approx([0.5])
    assert asked(ours, ["b"]) == [0.5]
    assert asked(ours, ["a"]) == pytest.approx([known[0] - 0.05 * (known[0] - 0.5)])
    draft(ours, [[0.9]], [1], ids=["a"])
    learned = ours.block_chances.rates.copy()
    assert asked(ours, ["c"]) == [0.5]
    assert asked(ours, ["a"]) == [0.5]
    verify(ours, [1], [1], ["a"])  # the old drafts do not count
    assert (ours.block_chances.rates == learned).all()
    draft(ours, [[0.7]], [1], ids=["a"])
    # A new request's bias is that of all requests.
    expected: Floats = ours.block_chances.acceptance(np.array([[0.7]])) * bias_of_all(
        ours.block_chances
    )
    assert ours.forecast.observed[-1][1] == pytest.approx(expected)


def test_a_new_request_leaves_the_others_what_they_have_learned() -> None:
    ours = ToldPlanner(1)
    draft(ours, [[0.9]], [1], ids=["a"])
    verify(ours, [1], [0], ["a"])
    draft(ours, [[0.9], [0.9]], [1, 1], ids=["a", "b"])
    hard, new = ours.forecast.observed[-1][1][:, 0]
    assert hard == pytest.approx(new * 8 / (0.9 + 8))


def prompts_of(ours: ToldPlanner) -> list[float]:
    """Share of steps with prompt rows, and how many prompt rows these have."""
    return [float(ours.costs.records[name][0]) for name in ("prompt_share", "prompt_rows")]


def test_what_steps_hold_and_cost_is_learned() -> None:
    """How much of a step was prompt is learned whether its time is known or not."""
    ours = ToldPlanner(1)
    prompt = StepRecord(["a", "b"], np.array([1, 0]), rows=41)
    assert ours.observe(prompt) is None
    assert prompts_of(ours) == [1 / 32, 40]
    timed = decoding([1, 1])
    timed.target_seconds = 0.013
    estimate = ours.observe(timed)
    assert estimate is not None
    assert estimate.target_seconds == pytest.approx(0.012)  # from before the step
    assert Level(ours.costs).at(2) == pytest.approx(0.001)
    assert prompts_of(ours)[0] == pytest.approx(31 / 32 / 32)


@pytest.mark.parametrize(
    ("is_probe", "ms", "refund"),
    [(True, 1.0, 1.0), (True, 0.5, 1.2), (True, 9, 0), (False, 0.5, 0)],
)
def test_a_probe_that_took_less_than_expected_can_come_again_sooner(
    is_probe: bool, ms: float, refund: float
) -> None:
    """Otherwise a profile that takes the drafter for far too slow would be wrong for minutes."""
    ours = ToldPlanner(2)
    ours._probe_charge = 0.0012
    step = decoding([1])
    step.plan = Plan(np.ones(1, dtype=bool), width=2, price=0.0, speedup=1.0, is_probe=is_probe)
    step.target_seconds, step.draft_rows, step.draft_seconds = 0.011, 6, ms / 1000
    ours.observe(step)
    assert ours.probes.saved * 1000 == pytest.approx(refund)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("num_requests", "times_too_slow"), [(1, 8), (4, 8), (8, 4)])
def test_a_drafter_that_was_profiled_on_a_busy_machine_is_drafted_with_soon(
    num_requests: int, times_too_slow: int, seed: int
) -> None:
    """Within 100 steps: a measurement far below the profile counts in full, and a probe that cost
    less than expected is refunded."""
    costs = profiled_costs()
    costs.draft.seconds[:] *= times_too_slow
    world = World(Planner(MAX_DRAFT, 64, costs), sure=0.93, unsure=0.6, seed=seed)
    world.run(names(num_requests), 100)
    drafted = len(world.drafted_steps)
    world.run(names(num_requests), 100)
    assert len(world.drafted_steps) - drafted > 50
