"""Compare our planning with the best fixed length in hindsight, over the same recorded texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from support.cost_table import CostTable
from support.fake_time import FakeTime
from support.recorded_drafts import RecordedDrafts
from support.simulated_device import Verified
from support.simulated_pipeline import Directed, Fixed, Pipeline, Scheduled
from vllm_dflash.engine import step_clock
from vllm_dflash.engine.step_clock import StepClock
from vllm_dflash.planning import Floats, Ints
from vllm_dflash.planning.ahead import AheadPlanner
from vllm_dflash.planning.budget import Load, RecentChances, best_budget
from vllm_dflash.planning.costs import StepCosts
from vllm_dflash.planning.step import NO_DRAFTS, StepRecord

COSTS = Path(__file__).parents[2] / "benchmarks" / "costs"
CAPTURED = (1, 3, 7)
FIRST_NEWS, MOST_NEWS = 4, 32


class Regime(NamedTuple):
    """Draft lengths that attention backends allow."""

    choices: tuple[int, ...]
    """Lengths that all requests of a step may be given, except 0."""
    trims: bool = False
    ragged_ms: float = 0.0

    def world(self) -> dict[str, Any]:
        """Return the arguments of a pipeline."""
        captured = (0, *self.choices) if self.ragged_ms else None
        return {"captured": captured, "ragged_ms": self.ragged_ms}


REGIMES = {
    "trims": Regime((7,), trims=True),
    "captured lengths": Regime(CAPTURED, ragged_ms=0.5),
    "any length": Regime(tuple(range(1, 8))),
}


class Ours:
    """Drives a started `AheadPlanner`, as `engine/v2/v2_scheduler.py` does."""

    may_draft = True

    def __init__(self, planner: AheadPlanner, clock: FakeTime) -> None:
        self.planner, self._time, self._clock = planner, clock, StepClock()
        self._news_in = self._news_every = FIRST_NEWS
        self._block_rows = 0

    def schedule(self, names: list[str], context: Ints) -> Directed:
        limits = np.full(len(names), self.planner.max_draft)
        ahead = self.planner.plan(names, context, limits)
        self._news_in -= 1
        learned = None
        if self._news_in <= 0:
            self._news_in = self._news_every = min(2 * self._news_every, MOST_NEWS)
            learned = self.planner.learned()
        return Directed(ahead.lengths, ahead.runs_block, ahead.min_verified, learned)

    def update(self, scheduled: Scheduled, verified: Verified) -> None:
        outcomes, names = verified.outcomes, scheduled.names
        source = np.where(scheduled.is_fresh, NO_DRAFTS, outcomes.source)
        done = StepRecord(names, verified.produced)
        done.verified = outcomes.admitted if self.planner.trims else scheduled.given
        done.rows = int(scheduled.others.sum() + done.verified.sum())
        done.context_lens = scheduled.context
        done.draft_rows = self._block_rows
        has_block = scheduled.directed.runs_block and scheduled.directed.places.any()
        self._block_rows = int(has_block) * len(names) * (1 + self.planner.max_draft)
        with patch.object(step_clock, "time", self._time):
            self._clock.finish(done)
        self.planner.observe(done, outcomes._replace(source=source))


class OurBudget:
    """Budget of the drafts that a step verifies, as in `engine/v2/trimming.py`."""

    def __init__(self, costs: StepCosts, num_slots: int, width: int) -> None:
        self.costs, self.width = costs, width
        self.recent = RecentChances(num_slots, width)
        self._min_verified, self._next_min_verified = 0, 0

    def drafts(self, scheduled: Scheduled, slots: Ints, chances: Floats) -> int:
        directed, drafts = scheduled.directed, scheduled.given
        self._min_verified, self._next_min_verified = self._next_min_verified, directed.min_verified
        if directed.learned is not None:
            self.costs.records[:] = directed.learned.costs
        for slot in slots[scheduled.is_fresh]:
            self.recent.forget(slot)
        self.recent.add(slots, chances[slots])
        most, decodes = int(drafts.sum()), slots >= 0  # a new request has its whole prompt computed
        if not most:
            return 0
        load = Load(
            num_requests=int(decodes.sum()),
            rows=int(scheduled.others.sum()),
            context=float(scheduled.context[decodes].sum()),
            mean_context=float(scheduled.context[drafts > 0].mean()),
            block_rows=directed.runs_block * len(slots) * (1 + self.width),
            block_context=float(scheduled.context.sum()),
        )
        scores, steps = self.recent.sample(slots, drafts)
        return best_budget(self.costs, load, scores, steps, most, self._min_verified)


def table_of(name: str) -> CostTable:
    """Return the costs of `assumed_gpu` or `cpu_2_cores`."""
    return CostTable.read(COSTS / f"{name}.json")


def ours(
    drafts: RecordedDrafts,
    num_requests: int,
    table: CostTable,
    regime: Regime,
    *,
    looks_up: bool = False,
    scale: float = 1.0,
    **world: Any,
) -> Pipeline:
    """Return a pipeline that we plan, with a profile of the target that is off by a factor."""
    clock, width = FakeTime(), drafts.width
    planner = AheadPlanner(width, num_requests, looks_up=looks_up)
    profiles = [table.costs(num_requests) for _ in range(2)]
    for profile in profiles:
        profile.verify.seconds[:] *= scale
    ragged_seconds = regime.ragged_ms / 1000
    planner.start(profiles[0], regime.choices, trims=regime.trims, ragged_seconds=ragged_seconds)
    budget = OurBudget(profiles[1], num_requests, width) if regime.trims else None
    return Pipeline(
        Ours(planner, clock),
        drafts,
        num_requests,
        table,
        budget=budget,
        looks_up=looks_up,
        clock=clock,
        **{**regime.world(), **world},
    )


def planner_of(pipeline: Pipeline) -> AheadPlanner:
    """Return the planner of one of our pipelines."""
    assert isinstance(pipeline.scheduler, Ours)
    return pipeline.scheduler.planner


def rate_of(pipeline: Pipeline, least: int = 6000) -> float:
    """Return tokens a second over at least `least` tokens, after a quarter as many that do not
    count. The stretches of text do not depend on what decodes them."""
    count = pipeline.num_requests
    pipeline.run(tokens=max(least // 4, 300 * count))
    return pipeline.run(tokens=max(least, 400 * count))


def fixed_rates(
    drafts: RecordedDrafts,
    num_requests: int,
    table: CostTable,
    regime: Regime,
    lengths: tuple[int, ...] | None = None,
    **world: Any,
) -> dict[int, float]:
    """Return the rates of plain decoding (0) and of blocks of each length that is compiled for."""
    tried = lengths or (tuple(range(8)) if not regime.ragged_ms else (0, *regime.choices))
    return {
        length: rate_of(
            Pipeline(Fixed(length), drafts, num_requests, table, **{**regime.world(), **world})
        )
        for length in tried
    }
