"""The policy of engines whose draft lengths are not planned."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_dflash.planning import Bools, Floats, Ints
from vllm_dflash.planning.step import Plan, StepRecord


class FixedLength:
    """Replacement for the planner with `draft_length: "fixed"`: always K drafts, or as many as a
    request can use."""

    agrees_across_ranks = True
    """Whether all tensor-parallel ranks get the same plan without exchanging it."""

    def __init__(self, max_draft: int) -> None:
        self.max_draft = max_draft

    def plan(self, ids: Sequence[str], context_lens: Ints, max_drafts: Ints, **_: object) -> Plan:
        """Draft for every request that can use drafts."""
        width = min(self.max_draft, int(max_drafts.max(initial=0)))
        return Plan(max_drafts > 0, width)

    def choose(self, step: StepRecord, confidence: Floats) -> tuple[Ints, Bools]:
        """Verify all drafts of the blocks."""
        lengths = np.minimum(step.max_drafts, step.plan.width) * step.plan.drafted
        return lengths, np.zeros(len(lengths), bool)

    def learn_drafts(self, step: StepRecord) -> None:
        """Do nothing."""

    def record_step(self, step: StepRecord) -> None:
        """Do nothing."""
