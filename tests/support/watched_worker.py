"""Methods that a test gives to every worker of an engine (`worker_extension_cls`)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from support.forced_texts import ForcedTexts
from support.planner_world import steady_costs
from vllm_dflash.engine.cadence import Cadence
from vllm_dflash.planning import Ints
from vllm_dflash.planning.planner import Planner
from vllm_dflash.planning.step import Plan, StepRecord


class Erratic(ForcedTexts):
    """Draws the utility per second as well, which differs from rank to rank."""

    def plan(self, ids: Sequence[str], context_lens: Ints, max_drafts: Ints, **_: object) -> Plan:
        plan = super().plan(ids, context_lens, max_drafts)
        return replace(plan, utility_per_second=self._dice.random())


class Unsteady(Cadence):
    """Plans after some steps, or soon, which differs from rank to rank."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._dice = np.random.default_rng(seed)

    def interval(self) -> int:
        return int(self._dice.integers(1, 4))


class Watched:
    """One rank of an engine on the V1 runner."""

    drafter: Any
    rank: int

    def profiled_costs(self) -> list[list[float]]:
        """Return the seconds by rows that the planner started from."""
        costs = self.drafter.host.planner.costs
        return [curve.seconds.tolist() for curve in (costs.verify, costs.draft, costs.context)]

    def draft_by(self, policy: str) -> None:
        """Draft by this policy from now on, and write down what is decided."""
        drafter = self.drafter
        max_draft = drafter.width
        drafter.host._cadence = Unsteady(seed=self.rank)
        if policy == "planned":
            drafter.start_planning(steady_costs(drafter.max_batch_size))
        else:
            drafter.host.backlog = None
            dice = Erratic(max_draft, seed=self.rank)  # different on every rank
            drafter.host.planner = dice if policy == "erratic" else Planner(max_draft, 1)
        self.decided: list[Any] = []
        self.drafted: list[Any] = []
        if not hasattr(self, "originals"):
            self.originals = drafter.host._plan, drafter.block.draft, drafter.propose
        plan, draft, propose = self.originals

        @functools.wraps(plan)
        def _plan(step: StepRecord, batch: Any) -> None:
            plan(step, batch)
            agreed = step.plan
            numbers = (agreed.width, agreed.holds_for, agreed.is_probe)
            self.decided.append((numbers, agreed.drafted.tolist(), agreed.utility_per_second))

        @functools.wraps(draft)
        def _draft(*args: Any) -> Any:
            result = draft(*args)
            self.drafted.append(result.tokens)
            return result

        @functools.wraps(propose)
        def _propose(*args: Any, **kwargs: Any) -> list[list[int]]:
            drafts = propose(*args, **kwargs)
            self.decided.append(drafts)
            return drafts

        drafter.host._plan, drafter.block.draft, drafter.propose = _plan, _draft, _propose

    def written_down(self) -> tuple[list[Any], list[Any]]:
        """Return plans and drafts handed over, in order, and all tokens that were drafted."""
        return self.decided, self.drafted
