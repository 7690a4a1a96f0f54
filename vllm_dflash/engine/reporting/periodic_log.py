"""A line in the log every so often, next to vLLM's own on speculative decoding."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vllm_dflash.engine.reporting.statistics import DraftStatistics


class PeriodicLog:
    """Says what was planned since the last line, and what came of it."""

    def __init__(
        self,
        statistics: DraftStatistics,
        interval: float,
        write: Callable[..., None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Write at most one line per `interval` seconds, through a logger's `info`."""
        self._statistics = statistics
        self._interval = interval
        self._write = write
        self._clock = clock
        self._due = clock() + interval
        self._last = self._read()

    def _read(self) -> dict[str, float]:
        now = self._statistics
        step = now.costs["step"]
        return {
            "able": now.drafted_steps + now.skipped_steps,
            "drafted": now.drafted_steps,
            "verifications": now.verifications,
            "drafts": now.draft_tokens,
            "accepted": now.accepted_tokens,
            "free": now.free_draft_tokens,
            "steps": step.count,
            "estimated": step.estimated,
            "measured": step.measured,
            "predicted": now.predicted_tokens,
            "produced": now.produced_tokens,
            "plain": now.plain_tokens,
        }

    def tick(self) -> None:
        """A step has ended; write if it is time to and anything could have been drafted."""
        now = self._clock()
        if now < self._due:
            return
        self._due = now + self._interval
        current = self._read()
        since = {name: value - self._last[name] for name, value in current.items()}
        self._last = current
        if not since["able"] or not since["steps"]:
            return
        self._write(*self._line(since))

    @staticmethod
    def _line(since: dict[str, float]) -> tuple[Any, ...]:
        verifications = max(since["verifications"], 1)
        milli = 1000 / since["steps"]
        return (
            "DFlash planner: Drafted steps: %.0f%%, Mean draft length: %.2f (free: %.0f%% of the"
            " drafts), Mean acceptance length: %.2f, Step: %.1f ms (estimated %.1f ms), Estimated"
            " gain over plain decoding, by the cost model: %.2fx (planned: %.2fx)",
            100 * since["drafted"] / since["able"],
            since["drafts"] / verifications,
            100 * since["free"] / max(since["drafts"], 1),
            1 + since["accepted"] / verifications,
            since["measured"] * milli,
            since["estimated"] * milli,
            since["produced"] / max(since["plain"], 1e-9),
            since["predicted"] / max(since["plain"], 1e-9),
        )
