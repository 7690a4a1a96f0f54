"""Draft lengths are planned by the engine's own step times, whatever its profile has said.

The tests have their own clock: the target, the block forward and the storing of context take fixed
milliseconds for each row, so what must be learned is known exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from support.engines import (
    DFLASH,
    USES_V2,
    engine,
    greedy,
    held_out_prompts,
    proposer_of,
    runner_of,
    scheduler_of,
    slow_on_v2,
    token_ids,
)
from support.fake_time import FakeTime
from vllm_dflash.engine import step_clock
from vllm_dflash.engine.v1.v1_profile import POWERS
from vllm_dflash.engine.v1.v1_worker import V1CPUWorker
from vllm_dflash.engine.v2 import v2_scheduler
from vllm_dflash.engine.v2.v2_cpu_worker import V2CPUWorker
from vllm_dflash.planning import step
from vllm_dflash.planning.costs import Curve, StepCosts

pytestmark = pytest.mark.usefixtures("runner")
REQUESTS = 4
TARGET, DRAFT, CONTEXT = (8.0, 0.4), (1.0, 0.05), (0.1, 0.02)
"""Milliseconds without rows, and for each row."""
OFTEN = 5
"""Numbers of rows that were met this often must have been learned."""


def scaled(factor: float, line: tuple[float, float]) -> Curve:
    """Return a profile with such an error, measured where engines measure theirs."""
    counts = np.array(POWERS)
    return Curve(counts, factor * (line[0] + line[1] * counts) / 1000)


class EngineTime(FakeTime):
    """A clock that advances by what the parts of an engine take."""

    def __init__(self) -> None:
        super().__init__()
        self.met: dict[str, Counter[int]] = {}
        """How often each number of rows was met, by part."""

    def part(
        self,
        name: str,
        line: tuple[float, float],
        function: Callable[..., Any],
        rows_of: Callable[..., int],
    ) -> Callable[..., Any]:
        """Return the function, made to take its time."""
        met = self.met[name] = Counter()

        def run(*args: Any, **kwargs: Any) -> Any:
            if rows := rows_of(*args):
                met[rows] += 1
                self.now += (line[0] + line[1] * rows) / 1000
            return function(*args, **kwargs)

        return run


@slow_on_v2
def test_what_steps_take_is_learned_from_the_engines_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The profile is a quarter off in each part, in either direction."""
    time = EngineTime()
    # V2 cannot time a block: a difference in it is attributed to the target.
    draft = scaled(1.0 if USES_V2 else 1.25, DRAFT)
    profiled = StepCosts(scaled(0.75, TARGET), draft, scaled(0.75, CONTEXT), REQUESTS)
    for kind in (V1CPUWorker, V2CPUWorker):
        monkeypatch.setattr(kind, "measure", lambda _: profiled)
    for module in (step, step_clock, v2_scheduler):
        monkeypatch.setattr(module, "time", time)
    with engine(
        speculative_config={**DFLASH, "free_drafts": "off"},  # their rows vary
        max_num_seqs=REQUESTS,
        enable_prefix_caching=False,
    ) as llm:
        runner, drafter = runner_of(llm), proposer_of(llm)
        block, context = drafter.model.block, drafter.model.context
        runner.execute_model = time.part(
            "target",
            TARGET,
            runner.execute_model,
            lambda scheduled, *rest: scheduled.total_num_scheduled_tokens,
        )
        block.forward = time.part("draft", DRAFT, block.forward, lambda ids, *rest: len(ids))
        if not USES_V2:  # there, storing context is part of the draft
            context.store = time.part(
                "context", CONTEXT, context.store, lambda features, *rest: len(features)
            )
        token_ids(llm, held_out_prompts(REQUESTS), greedy(320, ignore_eos=True))
        if USES_V2:
            costs = scheduler_of(llm).planner.costs
            stats = scheduler_of(llm).statistics.to_dict()
        else:
            costs = drafter.host.planner.costs
            (stats,) = llm.collective_rpc("dflash_stats")

    def often(part: str) -> list[int]:
        return [rows for rows, times in time.met[part].items() if times >= OFTEN]

    assert len(often("target")) > 1
    # Levels are learned faster than the curve's slope, which stays too flat for a while. So the
    # fewest and the most rows are a little off in opposite directions, and all together are not.
    expected, taken = 0.0, 0.0
    for rows in often("target"):
        learned = 1000 * float(costs.target(min(REQUESTS, rows), rows))
        assert learned == pytest.approx(TARGET[0] + TARGET[1] * rows, rel=0.1), rows
        expected += time.met["target"][rows] * learned
        taken += time.met["target"][rows] * (TARGET[0] + TARGET[1] * rows)
    assert expected == pytest.approx(taken, rel=0.05)
    assert often("draft")
    for rows in often("draft"):
        learned = 1000 * float(costs.draft.at(rows))
        assert learned == pytest.approx(DRAFT[0] + DRAFT[1] * rows, rel=0.05), rows
    # Only of steps without prompts: the others teach nothing.
    measured = stats["costs_ms"]
    assert measured["step"]["measured"] > TARGET[0] + TARGET[1] * REQUESTS
    assert USES_V2 or measured["draft"]["measured"] > DRAFT[0]
    assert stats["planning_share"] == 0.0
