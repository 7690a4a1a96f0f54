"""Who decides draft lengths on V1: the planner (`planning/planner.py`), or nobody."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from vllm_dflash.planning import Floats, Ints
from vllm_dflash.planning.step import Plan, Step, StepEstimate


class LengthPolicy(Protocol):
    """Asked in this order, with the step as far as it is known by then."""

    is_same_everywhere: bool
    """Whether all tensor-parallel ranks come to the same answers by themselves."""

    def plan(self, step: Step) -> Plan:
        """Whom to draft, and how wide."""

    def lengths(self, step: Step, confidence: Floats) -> Ints:
        """How many drafts of each request to verify, [R], given the probability of those that were
        drafted, [D, w]."""

    def observe(self, step: Step) -> StepEstimate | None:
        """A step is over; returns what its time was expected to be, if anything was."""


class FixedLength:
    """`draft_length: "fixed"`: always K, or as many as a request can use."""

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
