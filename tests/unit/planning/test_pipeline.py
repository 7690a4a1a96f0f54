"""The asynchronous scheduler in a simulated pipeline, against every fixed length in hindsight.

Costs have the shape of an 8B target on one GPU (stated in `support/simulated_pipeline.py`); the
scheduler is the real one, over a stand-in for vLLM's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.bare_scheduler import take_vllm_out
from support.fake_time import FakeTime
from support.planner_world import curve
from support.simulated_pipeline import (
    GPU_DRAFT,
    GPU_VERIFY,
    FixedScheduler,
    Pipeline,
    best_fixed,
)
from vllm_dflash.engine.scheduler import DFlashAsyncScheduler
from vllm_dflash.planning.costs import StepCosts

MAX_DRAFT = 15
CAPTURED = (0, 3, 7, 15)
BATCHES = (1, 4, 16, 64, 256)


class Ours:
    """Our scheduler, in time of its own."""

    def __init__(self, clock: FakeTime, *, scale: float, trims: bool) -> None:
        self.scheduler = DFlashAsyncScheduler()
        verify, draft = curve(GPU_VERIFY), curve(GPU_DRAFT)
        verify.seconds[:] *= scale
        costs = StepCosts(verify, draft, curve({1: 0.0, 2: 0.0}), max(BATCHES))
        assert self.scheduler.lengths is not None
        self.scheduler.lengths.start(costs, (0, MAX_DRAFT) if trims else CAPTURED, trims=trims)

    def schedule(self, scheduled: Any) -> None:
        self.scheduler._update_after_schedule(scheduled)

    def update(self, scheduled: Any, output: Any) -> None:
        self.scheduler.update_from_output(scheduled, output)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    """The scheduler's time; vLLM's scheduler below ours does nothing."""
    take_vllm_out(monkeypatch, MAX_DRAFT)
    time = FakeTime()
    for module in ("engine.scheduler", "planning.step"):
        monkeypatch.setattr(f"vllm_dflash.{module}.time", time)
    return time


def pipeline(
    clock: FakeTime,
    num_requests: int,
    rate: float,
    *,
    scale: float = 1.0,
    trims: bool = False,
    **settings: Any,
) -> Pipeline:
    ours = Ours(clock, scale=scale, trims=trims)
    return Pipeline(ours, MAX_DRAFT, num_requests, rate, clock=clock, **settings)


@pytest.mark.parametrize("rate", [0.05, 0.6, 0.93])
@pytest.mark.parametrize("num_requests", BATCHES)
def test_within_3_percent_of_the_best_fixed_length(
    clock: FakeTime, num_requests: int, rate: float
) -> None:
    """Requests come and go, some of them padded with drafts that nobody made."""
    settings = {"max_draft": MAX_DRAFT, "num_requests": num_requests, "rate": rate}
    best, _ = best_fixed(CAPTURED, 300, turnover=0.02, **settings)
    ours = pipeline(clock, num_requests, rate, turnover=0.02)
    ours.run(200)
    assert ours.run(600) > 0.97 * best


@pytest.mark.parametrize("scale", [0.8, 1.5])
@pytest.mark.parametrize("rate", [0.3, 0.8])
@pytest.mark.parametrize("num_requests", [1, 64])
def test_from_a_profile_that_is_wrong(
    clock: FakeTime, num_requests: int, rate: float, scale: float
) -> None:
    settings = {"max_draft": MAX_DRAFT, "num_requests": num_requests, "rate": rate}
    best, _ = best_fixed(CAPTURED, 300, **settings)
    ours = pipeline(clock, num_requests, rate, scale=scale)
    ours.run(300)
    assert ours.run(600) > 0.97 * best


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.8])
@pytest.mark.parametrize("num_requests", [1, 16, 256])
def test_where_the_device_trims_drafts(clock: FakeTime, num_requests: int, rate: float) -> None:
    """It verifies the number that is best; the scheduler is not told which."""

    def kept(requests: int, scheduled: int) -> int:
        widths = np.arange(MAX_DRAFT + 1)
        gain = np.concatenate([[0.0], np.cumsum(rate ** widths[1:])])
        rates = (1 + gain) / curve(GPU_VERIFY).at(requests * (1 + widths))
        return requests * int(widths[rates.argmax()])

    settings = {"max_draft": MAX_DRAFT, "num_requests": num_requests, "rate": rate, "kept": kept}
    best, _ = best_fixed((0, MAX_DRAFT), 300, **settings)
    ours = pipeline(clock, num_requests, rate, trims=True, kept=kept)
    ours.run(200)
    assert ours.run(600) > 0.97 * best
    assert set(ours.lengths) <= {0, MAX_DRAFT}


@pytest.mark.parametrize("num_requests", BATCHES)
def test_a_useless_drafter_costs_under_1_percent(clock: FakeTime, num_requests: int) -> None:
    plain = Pipeline(FixedScheduler(0), MAX_DRAFT, num_requests, 0.0).run(300)
    ours = pipeline(clock, num_requests, 0.0)
    ours.run(1000)
    assert ours.run(2000) > 0.99 * plain


@pytest.mark.parametrize("rate", [0.8, 0.93])
@pytest.mark.parametrize(("num_requests", "steps"), [(1, 50), (4, 50), (16, 50), (64, 60)])
def test_drafting_is_back_soon_once_it_pays(
    clock: FakeTime, num_requests: int, steps: int, rate: float
) -> None:
    """After the longest intervals between probes; and it ends soon once it does not pay.

    A probe of 64 requests takes longer than a step, so there it comes by less often.
    """
    ours = pipeline(clock, num_requests, 0.02)
    ours.run(1500)
    ours.rate = rate
    ours.run(steps)
    assert min(ours.lengths[-5:]) > 0
    ours.run(100)
    ours.rate = 0.02
    ours.run(100)
    assert np.count_nonzero(ours.lengths[-20:]) < 5  # probes
