"""How long steps take, from the end of one to the end of the next."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from vllm_dflash.planning.step import Step


class StepClock:
    """Times steps, from the end of one to the end of the next.

    The engine never waits while it has unfinished requests, so where a request goes on, all the
    time since the last step is part of this one.
    """

    def __init__(self) -> None:
        self._ended = 0.0
        self._ids: Sequence[str] = ()
        """Requests of the last step; none: it was a pause."""
        self._last: Step | None = None
        self._held = 0
        """Steps that the next one of their kind is to stand for."""
        self._held_seconds = 0.0

    def finish(self, step: Step, *, hold: bool = False) -> Step | None:
        """The step is over: write its seconds.

        Args:
            step: which one.
            hold: whether to wait for more steps like this one, and to take them together.

        Returns:
            Those that were held, as one, if this step is not like them.
        """
        last, self._last = self._last, step
        is_same_batch, only_decodes = self._ids == step.ids, step.only_decodes
        since = self.skip(step.ids)
        held = None
        if self._held and last is not None and step.verified.any():  # the held ones did not verify
            mean = self._held_seconds / self._held
            held = replace(last, target_seconds=mean, count=self._held)
        if not (is_same_batch and only_decodes) or held is not None:
            self._held, self._held_seconds = 0, 0.0
        step.seconds = since
        if not (since and only_decodes):
            return held
        self._held += 1
        self._held_seconds += since - step.draft_seconds - step.context_seconds
        if not hold:
            step.target_seconds = self._held_seconds / self._held
            step.count = self._held
            self._held, self._held_seconds = 0, 0.0
        return held

    def skip(self, ids: Sequence[str]) -> float:
        """A step of these requests is over, which nobody learns from: its seconds; 0: a pause."""
        last, self._ids = self._ids, ids
        now = time.perf_counter()
        since, self._ended = now - self._ended, now
        return since if ids and (last == ids or not set(last).isdisjoint(ids)) else 0.0
