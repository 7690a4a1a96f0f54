"""One length for the whole batch, a step ahead: in a simulated asynchronous engine, and by hand."""

import numpy as np
import pytest

from support.planner_world import (
    MAX_DRAFT,
    PER_REQUEST_MS,
    names,
    profiled_costs,
    step_of,
    straight_costs,
)
from support.told_planner import ToldProbes
from vllm_dflash.planning import uniform_length
from vllm_dflash.planning.survival import Calibration
from vllm_dflash.planning.uniform_length import UniformLength


class AsyncWorld:
    """Requests that never end; the length of a step's drafts was chosen one step before."""

    def __init__(self, rate: float, seed: int = 0) -> None:
        self.costs = profiled_costs()
        self.rate = rate
        self.rng = np.random.default_rng(seed)
        self.lengths: list[int] = []

    def run(self, policy: UniformLength | int, num_requests: int, steps: int) -> float:
        """Tokens per second."""
        tokens, seconds, waiting = 0, 0.0, 0
        ids = names(num_requests)
        for _ in range(steps):
            chosen = policy if isinstance(policy, int) else policy.choose(num_requests)
            lucky = self.rng.random((num_requests, MAX_DRAFT)) < self.rate
            accepted = np.minimum(np.cumprod(lucky, axis=1).sum(axis=1), waiting)
            rows = num_requests * (1 + waiting)
            took = float(self.costs.verify.at(rows)) + PER_REQUEST_MS / 1000 * num_requests
            if chosen:
                took += float(self.costs.draft.at(num_requests * (1 + MAX_DRAFT)))
            took *= 1 + 0.03 * self.rng.normal()
            if not isinstance(policy, int):
                step = step_of(ids, np.full(num_requests, waiting), accepted)
                step.target_seconds = took
                step.draft_rows = num_requests * (1 + MAX_DRAFT) * (chosen > 0)
                policy.observe(step)
            tokens += num_requests + int(accepted.sum())
            seconds += took
            self.lengths.append(chosen)
            waiting = chosen
        return tokens / seconds


def adaptive(choices: tuple[int, ...] = tuple(range(MAX_DRAFT + 1))) -> UniformLength:
    policy = UniformLength(MAX_DRAFT)
    policy.start(profiled_costs(), choices)
    return policy


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("num_requests", [1, 4, 16, 64])
def test_close_to_the_best_fixed_length(num_requests: int, rate: float) -> None:
    fixed = [AsyncWorld(rate).run(length, num_requests, 400) for length in range(MAX_DRAFT + 1)]
    assert AsyncWorld(rate).run(adaptive(), num_requests, 1500) > 0.96 * max(fixed)


def test_only_lengths_it_may_choose() -> None:
    world = AsyncWorld(0.8)
    for num_requests in (1, 4, 16):
        world.run(adaptive((0, 2, MAX_DRAFT)), num_requests, 200)
    assert set(world.lengths) <= {0, 2, MAX_DRAFT}


def test_drafts_to_the_full_until_costs_are_known() -> None:
    assert UniformLength(MAX_DRAFT).choose(64) == MAX_DRAFT


def test_probes_after_it_has_stopped() -> None:
    world = AsyncWorld(0.02)
    world.run(adaptive(), 8, 2000)
    tried = np.flatnonzero(world.lengths)
    assert len(tried) < 200
    assert tried[-1] > 1000


def test_learns_that_drafts_have_become_good() -> None:
    policy, world = adaptive(), AsyncWorld(0.02)
    world.run(policy, 4, 500)
    world.rate = 0.95
    world.run(policy, 4, 1500)
    assert np.mean(world.lengths[-100:]) > 3


def by_hand(max_draft: int, *choices: int) -> UniformLength:
    """n rows take 10 + n ms to verify, and (2 + n) / 4 to draft."""
    policy = UniformLength(max_draft)
    policy.start(straight_costs(), choices)
    policy.probes = ToldProbes()
    return policy


def learn(policy: UniformLength, verified: list[int], accepted: list[int], times: int) -> None:
    """Untimed steps."""
    for _ in range(times):
        policy.observe(step_of(names(len(verified)), np.array(verified), np.array(accepted)))


@pytest.mark.parametrize("choices", [(0, 3), (3, 1, 0), (0, 1, 2, 3)])
@pytest.mark.parametrize("num_requests", [1, 2, 3, 6, 20])
@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_the_best_rate_is_chosen(
    choices: tuple[int, ...], num_requests: int, accepted: int
) -> None:
    """Every rate of a choice, worked out one by one."""
    policy = by_hand(3, *choices)
    learn(policy, [3], [accepted], times=40)
    rates = {}
    for length in sorted(choices):
        tokens = num_requests * (1 + sum(policy.survival()[:length]))
        ms = 10.0 + num_requests * (1 + length)
        if length:  # the block is one of four rows, whatever the length
            ms += (2 + num_requests * 4) / 4
        rates[length] = tokens / ms
    best = max(rates, key=rates.__getitem__)
    pays = rates[best] > 1.01 * rates[0]
    assert policy.choose(num_requests) == (best if pays else 0)
    probes = policy.probes
    assert isinstance(probes, ToldProbes)
    assert probes.restarts == int(pays)
    if not pays:
        trial = min(length for length in choices if length >= 3 or length == max(choices))
        cost = num_requests * trial + (2 + num_requests * 4) / 4
        is_close = max(rate for length, rate in rates.items() if length) > 0.95 * rates[0]
        plain_ms = 10 + num_requests
        assert probes.asked == [
            (pytest.approx(plain_ms / 1000), pytest.approx(cost / 1000), is_close)
        ]
        probes.due = True
        assert policy.choose(num_requests) == trial


@pytest.mark.parametrize(
    ("max_draft", "choices", "probed"),
    [(7, (0, 2, 4, 7), 4), (7, (0, 3, 7), 3), (2, (0, 1, 2), 2), (7, (0, 7), 7)],
)
def test_a_probe_has_three_drafts_or_the_next_length_there_is(
    max_draft: int, choices: tuple[int, ...], probed: int
) -> None:
    policy = by_hand(max_draft, *choices)
    assert isinstance(policy.probes, ToldProbes)
    policy.probes.due = True
    learn(policy, [max_draft], [0], times=200)
    assert policy.choose(60) == probed


def test_what_promises_less_than_the_margin_nearly_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = by_hand(3, 0, 3)
    learn(policy, [3], [3], times=40)
    assert policy.choose(1) == 3
    monkeypatch.setattr(uniform_length, "MARGIN", 3.0)
    assert policy.choose(1) == 0
    assert isinstance(policy.probes, ToldProbes)
    ((_, _, is_close),) = policy.probes.asked
    assert is_close is True


def test_nobody_asks_for_the_full_length() -> None:
    assert by_hand(3, 0, 3).choose(0) == 3


def test_survival_is_learned_from_what_was_verified_past_the_prompt() -> None:
    policy = UniformLength(3)
    step = step_of(names(5), np.array([3, 0, 2, 1, 3]), np.array([1, 0, 2, 1, 0]))
    step.produced = np.array([2, 1, 3, 2, 0])  # the last one is in its prompt
    policy.observe(step)
    calibration = Calibration(3)
    calibration.observe(np.ones((3, 3)), np.array([3, 2, 1]), np.array([1, 2, 1]))
    assert policy.survival() == pytest.approx(np.cumprod(calibration.acceptance(np.ones((1, 3)))))
    before = policy.survival()
    learn(policy, [0, 0], [0, 0], times=3)
    assert policy.survival().tolist() == before.tolist()


@pytest.mark.parametrize(("draft_rows", "drafting"), [(0, 0.0), (8, 0.0025)])
def test_costs_learn_what_a_step_took_without_its_draft(draft_rows: int, drafting: float) -> None:
    """The time of a step holds the block behind the step before."""
    policy, costs = by_hand(3, 0, 3), straight_costs()
    step = step_of(names(2), np.array([0, 0]), np.array([0, 0]))
    step.draft_rows, step.target_seconds, step.count = draft_rows, 0.015, 3
    policy.observe(step)
    alone = step_of(names(2), np.array([0, 0]), np.array([0, 0]))
    alone.target_seconds, alone.count = 0.015 - drafting, 3
    costs.observe(alone)
    assert policy.costs is not None
    rows = np.array([2, 4, 8])
    assert policy.costs.decoding(2, rows) == pytest.approx(costs.decoding(2, rows))
    assert policy.costs.draft.seconds.tolist() == straight_costs().draft.seconds.tolist()
    assert (step.draft_rows, step.target_seconds) == (draft_rows, 0.015)


def test_a_step_of_unknown_time_teaches_no_costs() -> None:
    policy = by_hand(3, 0, 3)
    learn(policy, [3], [2], times=1)
    assert policy.costs is not None
    assert policy.costs.plain(1) == straight_costs().plain(1)
