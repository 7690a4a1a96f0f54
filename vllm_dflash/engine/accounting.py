"""What the proposer and the speculator both keep account of, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vllm_dflash.engine.clock import StepClock
from vllm_dflash.engine.statistics import DraftStatistics
from vllm_dflash.engine.warm import WarmState
from vllm_dflash.planning.length_policy import LengthPolicy


class StepAccounting:
    """Times and outcomes of steps, for the statistics and for the length policy to learn from."""

    lengths: LengthPolicy
    statistics: DraftStatistics
    clock: StepClock
    warm: WarmState
    _num_verified: int = 0
    """Drafts verified in this step."""
    _num_accepted: int = 0
    _is_left_out: bool = False

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Dummy runs of the runner inside are of the target alone."""
        self._is_left_out = True
        yield
        self._is_left_out = False

    def account_for_step(self, *, more_alike: bool) -> None:
        """The runner is done with a step: learn what it cost.

        Args:
            more_alike: whether steps like this one follow, and are to be taken together with it.
        """
        self.warm.check()
        wall, times = self.clock.end(more_alike=more_alike)
        accepted, self._num_accepted, self._num_verified = self._num_accepted, 0, 0
        self.statistics.seconds += wall
        self.statistics.planning_seconds = self.clock.planning_seconds
        if times is None:
            return
        with self.clock.timing("planning"):
            estimate = self.lengths.observe_step(times)
        if estimate is not None:
            produced = times.num_steps * times.num_requests + accepted
            self.statistics.observe_step(times, estimate, produced)
