"""Step durations, from the end of one step to the end of the next."""

from __future__ import annotations

import time
from collections.abc import Sequence

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

    def finish(self, step: StepRecord) -> None:
        """Write the `seconds` of a step that has just ended, and if it only decoded, its
        `target_seconds`."""
        step.seconds = self.end_step_unobserved(step.ids, step.rows)
        if step.seconds and step.only_decodes:
            step.target_seconds = step.seconds - step.draft_seconds - step.context_seconds

    def end_step_unobserved(self, ids: Sequence[str], rows: int) -> float:
        """End a step of so many rows that teaches nothing. Returns its seconds, 0 after a
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
