"""A policy that verifies free drafts, whatever they are worth."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_dflash.planning import Bools, Floats, Ints
from vllm_dflash.planning.planner import Planner
from vllm_dflash.planning.step import Plan, StepRecord


class ForcedTexts(Planner):
    """Decides at random which requests are drafted, which use what their text predicts, how much of
    it is verified."""

    def __init__(self, max_draft: int, seed: int = 0) -> None:
        super().__init__(max_draft, 1)
        self.is_started = True
        self._dice = np.random.default_rng(seed)

    def plan(self, ids: Sequence[str], context_lens: Ints, max_drafts: Ints, **_: object) -> Plan:
        rests = self._dice.random() < 0.5
        drafted = (max_drafts > 0) & (self._dice.random(len(ids)) < 0.7)
        if rests or not drafted.any():
            return Plan.without_block(len(ids))
        width = int(self._dice.integers(1, 1 + min(self.max_draft, max_drafts[drafted].max())))
        return Plan(drafted, width)

    def choose(self, step: StepRecord, confidence: Floats) -> tuple[Ints, Bools]:
        lengths, from_text = step.max_drafts, np.zeros(step.num_requests, bool)
        if step.predicted is not None:
            predicted = step.predicted.lengths
            takes = self._dice.random(step.num_requests) < 0.7
            from_text = (predicted > 0) & takes
            lengths = np.where(from_text, predicted, lengths)
        return self._dice.integers(0, lengths + 1), from_text

    def learn_drafts(self, step: StepRecord) -> None: ...

    def record_step(self, step: StepRecord) -> None: ...
