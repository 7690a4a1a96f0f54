"""What a model runner asks about draft lengths, whoever answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from vllm_dflash.planning import Floats, Ints
from vllm_dflash.planning.costs import StepEstimate, StepTimes
from vllm_dflash.planning.planner import Plan


class LengthPolicy(Protocol):
    """What a runner asks, in this order: `plan`, `lengths`, and then how it went."""

    def plan(self, ids: Sequence[str], room: Ints, pending: Ints) -> Plan:
        """Whom to draft, and how wide."""

    def lengths(self, plan: Plan, ids: Sequence[str], room: Ints, confidence: Floats) -> Ints:
        """How many of the drafted tokens to verify, [D]."""

    def observe_verification(self, ids: Sequence[str], drafted: Ints, accepted: Ints) -> None:
        """What became of drafts."""

    def observe_batch(self, prompt_rows: int) -> None:
        """How many rows of a step belonged to prompts."""

    def observe_step(self, times: StepTimes) -> StepEstimate | None:
        """How long a step took; returns what was expected, if anything was."""
