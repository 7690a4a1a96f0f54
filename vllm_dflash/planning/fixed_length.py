"""`draft_length: "fixed"`: every request is drafted to the full, every step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_dflash.planning import Floats, Ints
from vllm_dflash.planning.costs import StepEstimate, StepTimes
from vllm_dflash.planning.planner import Plan


class FixedLength:
    """Always K."""

    def __init__(self, max_draft: int) -> None:
        self.max_draft = max_draft

    def plan(self, ids: Sequence[str], room: Ints, pending: Ints) -> Plan:
        """Everybody who can use drafts."""
        drafted = room > 0
        width = min(self.max_draft, int(room.max())) if drafted.any() else 0
        return Plan(drafted, width, price=0.0, speedup=1.0)

    def lengths(self, plan: Plan, ids: Sequence[str], room: Ints, confidence: Floats) -> Ints:
        """All of them."""
        return np.minimum(room[plan.drafted], plan.width)

    def observe_verification(self, ids: Sequence[str], drafted: Ints, accepted: Ints) -> None:
        """Changes nothing."""

    def observe_batch(self, prompt_rows: int) -> None:
        """Changes nothing."""

    def observe_step(self, times: StepTimes) -> StepEstimate | None:
        """Expects nothing."""
        return None
