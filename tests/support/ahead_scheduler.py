"""Schedulers of the simulated pipeline: blocks of a fixed length, and ours, in place of
`engine/v2/v2_scheduler.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple
from unittest.mock import patch

import numpy as np

from support.fake_time import FakeTime
from support.simulated_device import Verified
from vllm_dflash.engine import step_clock
from vllm_dflash.engine.step_clock import StepClock
from vllm_dflash.planning import Bools, Ints
from vllm_dflash.planning.ahead import AheadPlanner, PlanAhead
from vllm_dflash.planning.step import NO_DRAFTS, Learned, StepRecord

FIRST_NEWS, MOST_NEWS = 4, 32


class Scheduled(NamedTuple):
    """A step as it goes to the device."""

    names: list[str]
    is_fresh: Bools
    """Whether each request has just arrived, [R]."""
    others: Ints
    """Rows of each request that are not drafts, [R]."""
    given: Ints
    """Places for each request's drafts, [R]."""
    context: Ints
    """Context tokens of each request, [R]."""
    ahead: PlanAhead
    """Decisions for what comes after it."""
    learned: Learned | None


@dataclass
class Fixed:
    """Always drafts blocks of the same length."""

    length: int

    @property
    def may_draft(self) -> bool:
        return self.length > 0

    def schedule(self, names: list[str], context: Ints) -> tuple[PlanAhead, None]:
        return PlanAhead(np.full(len(names), self.length), self.may_draft), None

    def update(self, scheduled: Scheduled, verified: Verified) -> None: ...


class Ours:
    """Drives a started `AheadPlanner`."""

    may_draft = True

    def __init__(self, planner: AheadPlanner, clock: FakeTime) -> None:
        self.planner, self._time, self._clock = planner, clock, StepClock()
        self._news_in = self._news_every = FIRST_NEWS
        self._block_rows = 0

    def schedule(self, names: list[str], context: Ints) -> tuple[PlanAhead, Learned | None]:
        limits = np.full(len(names), self.planner.max_draft)
        ahead = self.planner.plan(names, context, limits)
        self._news_in -= 1
        learned = None
        if self._news_in <= 0:
            self._news_in = self._news_every = min(2 * self._news_every, MOST_NEWS)
            learned = self.planner.learned()
        return ahead, learned

    def update(self, scheduled: Scheduled, verified: Verified) -> None:
        outcomes, names = verified.outcomes, scheduled.names
        source = np.where(scheduled.is_fresh, NO_DRAFTS, outcomes.source)
        done = StepRecord(names, verified.produced)
        done.verified = scheduled.given
        done.rows = int(scheduled.others.sum() + done.verified.sum())
        done.context_lens = scheduled.context
        done.draft_rows = self._block_rows
        has_block = scheduled.ahead.runs_block and scheduled.ahead.lengths.any()
        self._block_rows = int(has_block) * len(names) * (1 + self.planner.max_draft)
        with patch.object(step_clock, "time", self._time):
            self._clock.finish(done)
        self.planner.observe(done, outcomes._replace(source=source))
