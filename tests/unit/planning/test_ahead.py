"""Planning a step ahead, by hand: what is chosen, what is learned, and what is sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.chances_by_hand import Calibration
from support.outcomes import outcomes_of
from support.planner_world import names, step_of, straight, straight_costs
from support.told_planner import ToldForecast, ToldProbes
from vllm_dflash.planning import ahead as module
from vllm_dflash.planning.ahead import AheadPlanner
from vllm_dflash.planning.chances import TRUST
from vllm_dflash.planning.costs import Attention, StepCosts
from vllm_dflash.planning.forecast import drafts_with_block
from vllm_dflash.planning.planner import MARGIN
from vllm_dflash.planning.step import TEXT

ALIKE: dict[str, Any] = {"ragged_seconds": 1.0}
ANY: dict[str, Any] = {}


def by_hand(
    *curve: float,
    choices: tuple[int, ...] = (1, 2, 3),
    costs: StepCosts | None = None,
    **rules: Any,
) -> AheadPlanner:
    """Plan K drafts, each with the given survival. n rows take 10 + n ms to verify, and (2 + n) / 4
    ms to draft."""
    planner = AheadPlanner(len(curve), 8)
    planner.start(costs or straight_costs(), choices, **rules)
    planner.forecast = ToldForecast(np.array(curve), 0.5, 16)
    planner.probes = ToldProbes()
    return planner


def short(count: int) -> np.ndarray:
    return np.full(count, 10)


def test_drafts_to_the_full_until_costs_are_known() -> None:
    planner = AheadPlanner(3, 8)
    ahead = planner.plan(names(2), short(2), np.array([3, 1]))
    assert (ahead.lengths.tolist(), ahead.runs_block) == ([3, 1], True)
    assert planner.learned() is None


@pytest.mark.parametrize("curve", [(0.9, 0.8, 0.7), (0.8, 0.3, 0.1), (0.5, 0.2, 0.1), (0.1,) * 3])
@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_the_length_with_the_best_rate_is_chosen(
    curve: tuple[float, ...], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compares the rate of every length, worked out one by one."""
    planner = by_hand(*curve, **ALIKE)
    rates = {0: count / (10 + count)}
    for length in (1, 2, 3):
        ms = 10 + count * (1 + length) + (2 + 4 * count) / 4
        rates[length] = count * (1 + sum(curve[:length])) / ms
    best = max(rates, key=rates.__getitem__)
    chosen = planner.plan(names(count), short(count))
    if rates[best] > MARGIN * rates[0]:
        assert chosen.lengths.tolist() == [best] * count
        assert chosen.runs_block
        assert chosen.rate == pytest.approx(1000 * rates[best])
        assert planner.speedup == pytest.approx(rates[best] / rates[0])
    else:
        assert not chosen.lengths.any()
        assert not chosen.runs_block
    monkeypatch.setattr(module, "MARGIN", 3.0)
    assert not planner.plan(names(count), short(count)).runs_block


def test_one_long_context_gets_no_drafts_and_short_ones_go_on() -> None:
    """The long one is an inner one of four. A draft there takes 92 ms more, a plain step 14."""
    costs = straight_costs()
    costs.records["attention"] = Attention(draft=0.5e-6)
    planner = by_hand(0.9, 0.8, 0.7, costs=costs)
    ahead = planner.plan(names(4), np.array([100, 185_000, 100, 100]))
    assert ahead.runs_block
    assert ahead.lengths.tolist() == [3, 0, 3, 3]


@pytest.mark.parametrize(
    ("rules", "choices", "count", "lengths"),
    [
        (ANY, (1, 2, 3, 4, 5, 6, 7), 8, [3] + [0] * 7),
        (ALIKE, (1, 4, 7), 8, [4] * 8),
        (ALIKE, (7,), 1, [7]),
    ],
)
def test_a_probe_costs_little_and_verifies_some(
    rules: dict[str, Any], choices: tuple[int, ...], count: int, lengths: list[int]
) -> None:
    planner = by_hand(*[0.01] * 7, choices=choices, **rules)
    probes = planner.probes
    assert isinstance(probes, ToldProbes)
    assert not planner.plan(names(count), short(count)).runs_block
    ((plain, probe, is_close),) = probes.asked
    assert plain == pytest.approx((10 + count) / 1000)
    assert probe == pytest.approx((sum(lengths) + (2 + 8 * count) / 4) / 1000)
    assert not is_close
    probes.due = True
    ahead = planner.plan(names(count), short(count))
    assert (ahead.runs_block, ahead.lengths.tolist()) == (True, lengths)
    assert ahead.is_experiment
    assert not probes.restarts


def test_nobody_is_probed_who_has_no_place() -> None:
    planner = by_hand(0.01, 0.01, 0.01)
    assert isinstance(planner.probes, ToldProbes)
    planner.probes.due = True
    assert not planner.plan(names(2), short(2), np.zeros(2, np.int64)).runs_block
    assert planner.plan(names(2), short(2), np.array([0, 1])).lengths.tolist() == [0, 1]


def test_calibrations_learn_of_block_and_text_apart() -> None:
    planner = AheadPlanner(3, 8)
    planner.start(straight_costs(), range(4))
    block, text = Calibration(3), planner.text_chances.rates.copy()
    step = step_of(names(3), np.array([3, 2, 0]), np.array([1, 2, 0]))
    planner.observe(step, outcomes_of([3, 2, 0], 3, confidence=0.7, accepted=[1, 2, 0]))
    block.observe(np.full((2, 3), 0.7), np.array([3, 2]), np.array([1, 2]))
    np.testing.assert_allclose(planner.block_chances.rates, block.rates)
    np.testing.assert_allclose(planner.text_chances.rates, text)
    told = outcomes_of(
        [3, 2, 0], 3, source=TEXT, matches=5, lengths=3, known=[2, 3, 0], came_true=[1, 2, 0]
    )
    planner.observe(step, told)
    np.testing.assert_allclose(planner.block_chances.rates, block.rates)
    assert planner.text_chances.seen.sum() == pytest.approx(2 + 3)
    assert planner.text_chances.accepted.sum() == pytest.approx(1 + 2)


def test_blocks_are_learned_of_by_their_own_confidence() -> None:
    """Requests in their prompts, without a block, come before others and between them."""
    planner, block = AheadPlanner(3, 8), Calibration(3)
    planner.start(straight_costs(), range(4))
    confidence = np.array([[0.0] * 3, [0.7] * 3, [0.0] * 3, [0.4] * 3])
    step = step_of(names(4), np.array([0, 3, 0, 3]), np.array([0, 2, 0, 1]))
    told = outcomes_of([0, 3, 0, 3], 3, accepted=[0, 2, 0, 1])
    told = told._replace(confidence=confidence)
    planner.observe(step, told)
    block.observe(confidence[[1, 3]], np.array([3, 3]), np.array([2, 1]))
    np.testing.assert_allclose(planner.block_chances.rates, block.rates)


def test_what_a_step_brings_is_each_requests_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of five requests have a block. The first and last of these also have a text, which was
    promised for the last. An inner request has no block, and one is in its prompt; both have
    texts."""
    planner, seen = AheadPlanner(3, 8), list[Any]()
    planner.start(straight_costs(), range(4))
    monkeypatch.setattr(planner.forecast, "observe", lambda *what: seen.append(what))
    rows = planner._rows(names(5))
    planner.promises[:] = 1.0
    planner.promises[rows[[1, 3]]] = 0.0
    step = step_of(names(5), np.array([0, 3, 0, 3, 3]), np.array([0, 1, 0, 2, 0]))
    told = outcomes_of([0, 3, 0, 3, 3], 3, accepted=[0, 1, 0, 2, 0], known=[0, 1, 1, 0, 1])
    sure = np.array([0.0, 0.7, 0.0, 0.5, 0.7])
    told = told._replace(
        confidence=np.repeat(sure[:, None], 3, axis=1),
        matches=np.array([90, 40, 60, 0, 40]),
        text_lengths=np.array([3, 3, 3, 0, 3]),
    )
    planner.observe(step, told)
    ((of, curves, samples),) = seen
    assert of.tolist() == rows[[1, 3, 4]].tolist()
    alone = sure[[1, 3, 4], None] ** [1, 2, 3]
    np.testing.assert_allclose(curves, alone)
    np.testing.assert_allclose(samples, [TRUST[40:43].cumprod(), *alone[1:]])


def going_on(planner: AheadPlanner, times: int = 20, match: int = 40) -> None:
    """Observe steps where one request's text comes true, and the other's predicts nothing."""
    for _ in range(times):
        step = step_of(names(2), np.array([3, 0]), np.array([3, 0]))
        told = outcomes_of([3, 0], 3, source=TEXT, known=[3, 0], came_true=[3, 0])
        lengths, matches = np.array([3, 0]), np.array([match, 0])
        planner.observe(step, told._replace(text_lengths=lengths, matches=matches))


def test_where_a_text_goes_on_no_block_is_needed() -> None:
    planner = by_hand(0.05, 0.02, 0.01)
    going_on(planner)
    ahead = planner.plan(names(2), short(2))
    assert not ahead.runs_block
    assert ahead.lengths[0] == 3
    assert planner.speedup > 1.5
    # A block runs if it brings more to the other request than it takes.
    assert isinstance(planner.forecast, ToldForecast)
    planner.forecast = ToldForecast(np.array([0.95, 0.93, 0.9]), 0.5, 16)
    assert planner.plan(names(2), short(2)).runs_block


def test_what_goes_round_in_circles_promises_no_more_than_a_circle() -> None:
    planner = by_hand(0.05, 0.02, 0.01)
    for _ in range(20):
        step = step_of(["a"], np.array([3]), np.array([2]))
        told = outcomes_of([3], 3, source=TEXT, matches=40, lengths=2, known=[2], came_true=[2])
        planner.observe(step, told)
    first, second, third = planner.promises[planner._rows(["a"])][0]
    assert first >= second > 0.8
    assert third < 0.1
    assert planner.plan(["a"], short(1)).lengths == [2]


def test_a_match_that_has_ended_promises_what_is_typical() -> None:
    planner = by_hand(0.05, 0.02, 0.01)
    going_on(planner)
    assert planner.promises[planner._rows(names(1))][0, 0] > 0.8
    step = step_of(names(2), np.array([3, 0]), np.array([1, 0]))
    ended = outcomes_of([3, 0], 3, source=TEXT, known=[2, 0], came_true=[1, 0])
    planner.observe(step, ended._replace(text_lengths=np.array([3, 0])))
    rows = planner._rows(["request-0", "new"])
    typical = planner.typical_promise
    np.testing.assert_array_equal(planner.promises[rows], [typical, typical])
    assert not planner.plan(names(2), short(2)).lengths.any()


def test_what_a_blocks_step_brings_holds_surprises_of_texts() -> None:
    """The better drafts are taken. That is due to the block, unless it was predicted."""
    curves, found = np.array([[0.5, 0.2]] * 3), np.array([[0.9, 0.8], [0.9, 0.8], [0.1, 0.1]])
    promised = np.array([[0.0, 0.0], [0.9, 0.9], [0.0, 0.0]])
    seen = drafts_with_block(curves, found, promised)
    np.testing.assert_array_equal(seen, [[0.9, 0.8], [0.5, 0.2], [0.5, 0.2]])


@pytest.mark.parametrize(("draft_rows", "drafting"), [(0, 0.0), (8, 0.0025)])
def test_costs_learn_what_a_step_took_without_the_block_in_it(
    draft_rows: int, drafting: float
) -> None:
    """A step's time includes the block after the step before."""
    planner, costs = by_hand(0.1, 0.1, 0.1), straight_costs()
    step = step_of(names(2), np.array([0, 0]), np.array([0, 0]))
    step.draft_rows, step.target_seconds, step.count = draft_rows, 0.015, 3
    estimate = planner.observe(step, None)
    alone = step_of(names(2), np.array([0, 0]), np.array([0, 0]))
    alone.target_seconds, alone.count = 0.015 - drafting, 3
    of_alone = costs.observe(alone)
    # The estimate that the step's time is compared with includes the block, too.
    assert estimate is not None
    assert estimate.target_seconds == pytest.approx(of_alone.target_seconds + drafting)
    assert estimate.plain_seconds == of_alone.plain_seconds
    rows = np.array([2, 4, 8])
    assert planner.costs.decoding(2, rows) == pytest.approx(costs.decoding(2, rows))
    assert (step.draft_rows, step.target_seconds) == (draft_rows, 0.015)


def test_a_block_profiled_too_slow_does_not_make_plain_decoding_fast() -> None:
    """Its estimated time is subtracted from steps that were measured with it: what is left for the
    target is too little, and says nothing about steps without drafts."""
    slow = StepCosts.of(straight(10, 1), straight(5, 0.25), straight(0.2, 0.05), 64)
    planner = by_hand(0.1, 0.1, 0.1, costs=slow)
    plain = planner.costs.plain(2)
    for _ in range(40):
        step = step_of(names(2), np.array([1, 1]), np.array([0, 0]))
        step.draft_rows, step.target_seconds = 8, 0.016  # 4 rows, and 2 ms for the block
        estimate = planner.observe(step, None)
    assert planner.costs.plain(2) == pytest.approx(plain, rel=0.05)
    assert estimate is not None
    assert estimate.target_seconds == pytest.approx(0.016, rel=0.02)


def test_a_probe_that_has_paid_for_itself_is_refunded() -> None:
    planner = by_hand(*[0.01] * 3, costs=StepCosts.of(straight(10, 1), *(straight(1, 0),) * 2, 8))
    probes = planner.probes
    assert isinstance(probes, ToldProbes)
    probes.due = True
    assert planner.plan(["a"], short(1)).runs_block
    probes.due, before = False, probes.saved
    step = step_of(["a"], np.array([3]), np.array([2]))
    planner.observe(step, outcomes_of([3], 3, confidence=0.9, accepted=[2]))
    assert probes.saved - before == pytest.approx(0.004)  # a block and 3 rows, not 2 steps of 11 ms


def test_blocks_that_pay_are_no_probes() -> None:
    """After a probe they are planned. Luck with one overturns nothing, and brings no refund."""
    planner = by_hand(*[0.01] * 3)
    probes = planner.probes
    assert isinstance(probes, ToldProbes)
    probes.due = True
    assert planner.plan(["a"], short(1)).runs_block
    planner.forecast = ToldForecast(np.array([0.9, 0.8, 0.7]), 0.5, 16)
    assert planner.plan(["a"], short(1)).runs_block
    assert probes.restarts == 1
    saved, probed = probes.saved, planner._probed.copy()
    step = step_of(["a"], np.array([3]), np.array([2]))
    planner.observe(step, outcomes_of([3], 3, confidence=0.9, accepted=[2]))
    assert probes.saved == saved
    np.testing.assert_array_equal(planner._probed, probed)


def test_what_is_learned_is_sent_as_copies() -> None:
    planner = by_hand(0.1, 0.1, 0.1)
    learned = planner.learned()
    assert learned is not None
    before = [np.array(one).copy() for one in learned]
    going_on(planner)
    planner.observe(
        step_of(["a"], np.array([3]), np.array([3])),
        outcomes_of([3], 3, confidence=0.9, accepted=[3]),
    )
    for kept, one in zip(before, learned, strict=True):
        np.testing.assert_array_equal(kept, one)
    now = planner.learned()
    assert now is not None
    assert (now.text_rates != learned.text_rates).any()
    assert (now.block_rates != learned.block_rates).any()


def test_what_plans_take_that_were_not_found_here() -> None:
    """Rows and the block, and more if a step's requests have different lengths, or no graph."""
    planner = by_hand(0.9, 0.8, 0.7, choices=(3, 7), ragged_seconds=1.0)
    plans = np.array([[3, 3], [7, 7], [7, 3], [5, 5]])
    block = (2 + 2 * 4) / 4000
    expected = [(10 + 2 + sum(plan)) / 1000 + block for plan in plans.tolist()]
    expected = [one + more for one, more in zip(expected, [0.0, 0.0, 1.0, 1.0], strict=True)]
    assert planner.seconds(plans, short(2)).tolist() == pytest.approx(expected)
    assert planner._alike.tolist() == [3]  # for chains


def test_what_a_chain_would_have_brought_behind_what_was_verified() -> None:
    """K = 5. Three drafts are verified and all accepted; one of three is rejected; all five are
    verified; the fourth of the last request was not finite."""
    planner = by_hand(*[0.5] * 5)
    confidence = np.tile([0.9, 0.9, 0.9, 0.5, 0.35], (4, 1))
    confidence[3, 3] = 0.0
    outcomes = outcomes_of([3, 3, 5, 3], 5, accepted=[3, 2, 5, 3])._replace(confidence=confidence)
    rates = Calibration(5).acceptance(confidence[:1])[0]
    whole = rates[3] + rates[3] * rates[4]
    assert planner.rest_of_chains(outcomes).tolist() == pytest.approx([whole, 0.0, 0.0, 0.0])
