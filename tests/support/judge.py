"""Compare our planning with the best fixed length in hindsight, over the same recorded texts."""

from __future__ import annotations

from typing import Any, NamedTuple

from support.ahead_scheduler import Ours
from support.cost_table import CostTable
from support.fake_time import FakeTime
from support.recorded_drafts import RecordedDrafts
from support.simulated_pipeline import Pipeline
from vllm_dflash.planning.costs import NO_ATTENTION, Attention, Curve

CAPTURED = (1, 3, 7)


class Regime(NamedTuple):
    """Draft lengths that attention backends allow."""

    choices: tuple[int, ...]
    """Lengths that all requests of a step may be given, except 0."""
    ragged_ms: float = 0.0

    def world(self) -> dict[str, Any]:
        """Return the arguments of a pipeline."""
        captured = (0, *self.choices) if self.ragged_ms else None
        return {"captured": captured, "ragged_ms": self.ragged_ms}


REGIMES = {
    "captured lengths": Regime(CAPTURED, ragged_ms=0.5),
    "any length": Regime(tuple(range(1, 8))),
}


def ours(
    drafts: RecordedDrafts,
    num_requests: int,
    table: CostTable,
    regime: Regime,
    *,
    looks_up: bool = False,
    scale: float = 1.0,
    attention: Attention = NO_ATTENTION,
    **world: Any,
) -> Pipeline:
    """Return a pipeline that we plan, with a profile of the target that is off by a factor."""
    clock = FakeTime()
    profile = table.costs(num_requests, attention, scale)
    # On V2, a block's time includes that of storing context.
    profile.context = Curve(profile.context.counts, 0 * profile.context.seconds)
    ragged_seconds = regime.ragged_ms / 1000
    return Pipeline(
        Ours(profile, regime.choices, ragged_seconds, clock),
        drafts,
        num_requests,
        table,
        looks_up=looks_up,
        attention=attention,
        clock=clock,
        **{**regime.world(), **world},
    )


def planner_of(pipeline: Pipeline) -> Any:
    """Return the planner of one of our pipelines."""
    assert isinstance(pipeline.scheduler, Ours)
    return pipeline.scheduler.planner


def rate_of(pipeline: Pipeline, least: int = 6000) -> float:
    """Return tokens a second over at least `least` tokens, after a quarter as many that do not
    count. The stretches of text do not depend on what decodes them."""
    count = pipeline.num_requests
    pipeline.run(tokens=max(least // 4, 300 * count))
    return pipeline.run(tokens=max(least, 400 * count))
