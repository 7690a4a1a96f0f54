"""What a model runner asks about draft lengths, whoever answers."""

from __future__ import annotations

from typing import Protocol

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
