"""How long steps take, from the end of one to the end of the next."""

from __future__ import annotations

import time
from collections.abc import Sequence

from vllm_dflash.planning.step import Step


class StepClock:
    """Times steps, from the end of one to the end of the next.

    The engine never waits while it has unfinished requests, so where a request goes on, all the
    time since the last step is part of this one.
    """

    def __init__(self) -> None:
        self._ended = 0.0
        self._last_ids: Sequence[str] = ()

    def finish(self, step: Step) -> None:
        """The step is over: write its seconds, if anybody goes on from the last one."""
        now = time.perf_counter()
        since, self._ended = now - self._ended, now
        last, self._last_ids = self._last_ids, step.ids
        if set(last).isdisjoint(step.ids):
            return
        step.seconds = since
        if step.only_decodes:
            step.target_seconds = since - step.draft_seconds - step.context_seconds
