"""`draft_length: "fixed"`: every request is drafted to the full, every step."""

from __future__ import annotations

import numpy as np

from vllm_dflash.planning import Floats, Ints
from vllm_dflash.planning.step import Plan, Step


class FixedLength:
    """Always K, or as many as a request can use."""

    is_same_everywhere = True

    def __init__(self, max_draft: int) -> None:
        self.max_draft = max_draft

    def plan(self, step: Step) -> Plan:
        """Everybody who can use drafts."""
        drafted = step.limits > 0
        width = min(self.max_draft, int(step.limits.max(initial=0)))
        return Plan(drafted, width, price=0.0, speedup=1.0)

    def lengths(self, step: Step, confidence: Floats) -> Ints:
        """All of them."""
        return np.minimum(step.limits, step.plan.width) * step.plan.drafted

    def observe(self, step: Step) -> None:
        """Expects nothing, and learns nothing."""
