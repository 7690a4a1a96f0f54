"""Step durations, from the end of one step to the end of the next."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from vllm_dflash.planning.step import StepRecord


class StepClock:
    """Times steps, from the end of one to the end of the next.

    The engine does not wait while it has unfinished requests. So if a request continues from the
    last step, all the time since then belongs to this step; unless it is far too long, as when the
    engine or its machine was put to sleep.
    """

    PAUSE_SECONDS, PAUSE_TIMES = 5.0, 20.0
    """A step was a pause if it took more seconds than this, and this many times the usual time of
    its rows."""

    def __init__(self) -> None:
        self._ended = self._row_seconds = 0.0
        self._ids: Sequence[str] = ()
        """Requests of the last step; empty after a pause."""
        self._last: StepRecord | None = None
        self._held = 0
        """Held steps, to be reported together with the next one of their kind."""
        self._held_seconds = 0.0

    def finish(self, step: StepRecord, *, hold: bool = False) -> StepRecord | None:
        """Write the seconds of a step that has just ended.

        Args:
            step: gets its `seconds`, and if it only decoded and is not held, `target_seconds` and
                `count`.
            hold: whether to wait for more steps like this one, and report them together.

        Returns:
            The mean of the held steps, if this step ends them by verifying drafts; else None.
        """
        last, self._last = self._last, step
        is_same_batch, only_decodes = self._ids == step.ids, step.only_decodes
        since = self.end_step_unobserved(step.ids, step.rows)
        held = None
        if self._held and last is not None and step.verified.any():  # held steps verify no drafts
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

    def end_step_unobserved(self, ids: Sequence[str], rows: int) -> float:
        """End a step of so many rows that nobody learns from. Returns its seconds, 0 after a
        pause."""
        last, self._ids = self._ids, ids
        now = time.perf_counter()
        since, self._ended = now - self._ended, now
        if not ids or (last != ids and set(last).isdisjoint(ids)):
            return 0.0
        usual = self._row_seconds * max(rows, 1)
        if usual and since > max(self.PAUSE_SECONDS, self.PAUSE_TIMES * usual):
            return 0.0
        weight = 0.2 if usual else 1.0
        self._row_seconds += weight * (since / max(rows, 1) - self._row_seconds)
        return since
