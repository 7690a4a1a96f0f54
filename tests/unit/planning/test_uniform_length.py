"""One length for the whole batch, a step ahead: in a simulated asynchronous engine."""

import numpy as np
import pytest

from support.planner_world import MAX_DRAFT, PER_REQUEST_MS, names, profiled_costs, step_of
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
    policy = UniformLength(MAX_DRAFT, choices)
    policy.costs = profiled_costs()
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
    assert UniformLength(MAX_DRAFT, {0, MAX_DRAFT}).choose(64) == MAX_DRAFT


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
