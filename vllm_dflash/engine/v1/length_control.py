"""Draft lengths of one worker on V1, step by step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_dflash.engine.agreement import agreed_lengths, agreed_plan
from vllm_dflash.engine.reporting.statistics import DraftStatistics
from vllm_dflash.engine.step_clock import StepClock
from vllm_dflash.engine.v1.length_policy import FixedLength, LengthPolicy
from vllm_dflash.planning import Floats, Ints
from vllm_dflash.planning.step import Plan, Step

NO_CONFIDENCE = np.zeros((0, 0))
"""Of a step that drafts nobody."""
MOST_REMEMBERED = 4096
"""Requests that were given free drafts and have not been seen since."""


class LengthControl:
    """Asks a policy, on every rank alike; times the steps; counts what came of them."""

    def __init__(self, max_draft: int) -> None:
        """For drafts of up to `max_draft` tokens, which is what all get until `policy` is set."""
        self.policy: LengthPolicy = FixedLength(max_draft)
        self.statistics = DraftStatistics(max_draft)
        self._clock = StepClock()
        self._skip_steps = 0
        """How often `policy` need not be asked again, while the batch is this one:"""
        self._skip_ids: Sequence[str] = ()
        self._could_draft = False
        self._from_text: set[str] = set()
        """Requests whose last drafts are free ones: they may have to wait for their turn."""

    def observe_verification(self, step: Step) -> None:
        """What became of the drafts that the step verified; needs `verified`."""
        if self._from_text:
            is_free = np.array([name in self._from_text for name in step.ids])
            step.verified_free = step.verified * is_free
        self.statistics.observe_verification(step)

    def take_skip(self, step: Step) -> bool:
        """Whether an earlier plan said that nobody drafts in this step either; uses up one such."""
        if not self._skip_steps or step.ids != self._skip_ids:
            self._skip_steps = 0
            return False
        self._skip_steps -= 1
        step.plan = Plan.nothing(step.num_requests)
        step.could_draft = self._could_draft
        step.is_resting = True
        return True

    def plan(self, step: Step) -> Plan:
        """Whom to draft and how wide; needs the step's `limits`, `waiting` and `predicted`."""
        if not step.is_resting:
            step.could_draft = bool(step.limits.any())
        with step.timing("planning"):
            plan = self.policy.plan(step)
        step.plan = plan if self.policy.is_same_everywhere else agreed_plan(plan)
        if not step.plan.width and not step.is_resting:
            self._skip_steps, self._skip_ids = step.plan.skip_steps, step.ids
            self._could_draft = step.could_draft
        return step.plan

    def choose(self, step: Step, usable: Ints, confidence: Floats) -> Ints:
        """How many drafts of each request go on to be verified, [R].

        Args:
            step: with its plan.
            usable: drafts of each that can be verified, [R].
            confidence: probability of each drafted token under the drafter, [D, w].
        """
        drafted = step.plan.drafted
        step.nan_drafts = int(np.minimum(step.limits, step.plan.width)[drafted].sum())
        step.nan_drafts -= int(usable[drafted].sum())
        step.limits = usable
        with step.timing("planning"):
            step.lengths = self.policy.lengths(step, confidence)
        if not self.policy.is_same_everywhere:
            step.lengths, step.from_text = agreed_lengths(step.lengths, step.from_text)
        return step.lengths

    def end(self, step: Step) -> None:
        """The runner is done with a step."""
        # A step that verified drafts is unlike the undrafted ones that may follow it.
        is_skipping = self._skip_steps > 0 and not step.verified.any()
        held = self._clock.finish(step, hold=is_skipping)
        self._from_text.difference_update(step.ids)
        if len(self._from_text) > MOST_REMEMBERED:  # of requests that ended with their drafts
            self._from_text.clear()
        self._from_text.update(step.ids[request] for request in np.nonzero(step.from_text)[0])
        if held is not None:
            self.statistics.compare(held, self.policy.observe(held))
        with step.timing("planning"):
            estimate = self.policy.observe(step)
        self.statistics.observe(step, estimate)
