"""On a machine whose host takes longer than its device, a longer draft is free.

Costs that V2's planner learns are what a step takes from one output to the next, host included. The
profile at the start knows the device, and one launch after the other; learning corrects it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.ahead_scheduler import Fixed
from support.judge import REGIMES, Regime, ours, planner_of, rate_of
from support.judged_cells import SMALL_MODEL
from support.recorded_drafts import RecordedDrafts, recorded_drafts
from support.simulated_pipeline import Pipeline

CAPTURED = REGIMES["captured lengths"]
DEVICE_MS = 1.0
"""What a step of few requests takes the device, of a small model on a large GPU."""
HOST: dict[str, Any] = {"host_ms": 2.6 * DEVICE_MS}


@pytest.fixture(scope="module", params=[0, 1], ids=["greedy", "drawn"])
def drafts(request: pytest.FixtureRequest) -> RecordedDrafts:
    return recorded_drafts()[request.param]


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_it_drafts_k_in_every_step(drafts: RecordedDrafts, count: int) -> None:
    """Once it has learned what a step takes, and whatever the drafter is worth. Some steps decode
    plainly, to measure what that takes, and those that follow verify nothing."""
    pipeline = ours(drafts, count, SMALL_MODEL, CAPTURED, **HOST)
    pipeline.run(steps=400)
    pipeline.run(steps=400)
    blocks = pipeline.block_steps[-400:]
    assert np.mean(blocks) > 0.95
    verified = np.concatenate(pipeline.admitted[-400:])
    assert np.mean(verified == drafts.width) > 0.95


@pytest.mark.parametrize("count", [1, 8, 32])
@pytest.mark.parametrize("regime", REGIMES.values(), ids=[*REGIMES])
def test_it_is_as_fast_as_the_best_fixed_length(
    drafts: RecordedDrafts, count: int, regime: Regime
) -> None:
    least = 2000
    world: dict[str, Any] = {**regime.world(), **HOST}
    best = max(
        rate_of(Pipeline(Fixed(length), drafts, count, SMALL_MODEL, **world), least)
        for length in (0, 7)
    )
    assert rate_of(ours(drafts, count, SMALL_MODEL, regime, **HOST), least) > 0.95 * best


@pytest.mark.parametrize("count", [1, 8])
def test_the_profile_is_corrected_within_half_a_second(drafts: RecordedDrafts, count: int) -> None:
    """A step then is expected to take what the host takes, 2.6 times the profile's. It is planned,
    and learned from, about every twentieth step: planning takes a hundredth of the time."""
    pipeline = ours(drafts, count, SMALL_MODEL, CAPTURED, **HOST)
    planner = planner_of(pipeline)
    rows = count * (1 + drafts.width)

    def expected_ms() -> float:
        verify = planner.costs.target(count, rows, float(pipeline.context().sum()))
        return 1000 * float(verify + planner.costs.blocks(count, drafts.width))

    assert expected_ms() < 1.7 * DEVICE_MS
    pipeline.run(steps=190)
    assert expected_ms() == pytest.approx(2.6 * DEVICE_MS, rel=0.15)


def test_a_host_that_is_busy_hides_the_device() -> None:
    """The simulation itself: plain decoding takes what the host takes, drafted or not."""
    drafts = recorded_drafts()[0]
    rates = []
    for length in (0, 7):
        pipeline = Pipeline(Fixed(length), drafts, 1, SMALL_MODEL, noise=0.0, **HOST)
        pipeline.run(steps=100)
        before = pipeline.clock.now
        pipeline.run(steps=100)
        rates.append((pipeline.clock.now - before) / 100)
    assert rates == pytest.approx([0.0026, 0.0026], rel=1e-6)
