"""Times of one step, taken in the worker."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from vllm_dflash.planning.costs import StepTimes


@dataclass
class StepClock:
    """Collects what a step did and how long, from the end of one step to that of the next.

    Wall-clock times: on a platform where kernels run on, they have to be waited for.
    """

    num_requests: int = 0
    num_tokens: int = 0
    only_decodes: bool = False
    draft_rows: int = 0
    draft_seconds: float = 0.0
    context_rows: int = 0
    context_seconds: float = 0.0
    planning_seconds: float = 0.0
    """Of all steps together."""
    _batch: Sequence[str] = ()
    _continues: bool = False
    _ended: float = 0.0
    _steps: int = 0
    _step_seconds: float = 0.0

    def begin(self, batch: Sequence[str], num_tokens: int, *, only_decodes: bool) -> None:
        """A step has run the target over these requests."""
        # The engine never waits while it has unfinished requests, so where a request goes on,
        # all the time since the last step is part of this one.
        self._continues = batch == self._batch or not set(batch).isdisjoint(self._batch)
        if batch != self._batch:
            self._steps, self._step_seconds = 0, 0.0
        self._batch = batch
        self.num_requests, self.num_tokens = len(batch), num_tokens
        self.only_decodes = only_decodes

    @contextmanager
    def timing(self, part: str) -> Iterator[None]:
        """Add what runs inside to the seconds of `draft`, `context` or `planning`."""
        started = time.perf_counter()
        yield
        name = f"{part}_seconds"
        setattr(self, name, getattr(self, name) + time.perf_counter() - started)

    def end(self, *, more_alike: bool) -> tuple[float, StepTimes | None]:
        """The step is over.

        Args:
            more_alike: whether to wait for more steps like this one before saying what it took.

        Returns:
            Its seconds, 0 if it began after idling; and what it did, if it only decoded.
        """
        now = time.perf_counter()
        wall, self._ended = now - self._ended, now
        if not self._continues:
            wall = 0.0
        elif self.only_decodes:
            self._steps += 1
            self._step_seconds += wall - self.draft_seconds - self.context_seconds
        times = None
        if self._steps and not more_alike:
            times = StepTimes(
                self.num_requests,
                self.num_tokens,
                self._step_seconds / self._steps,
                self.draft_rows,
                self.draft_seconds,
                self.context_rows,
                self.context_seconds,
                self._steps,
            )
        if not more_alike:
            self._steps, self._step_seconds = 0, 0.0
        self.draft_rows = self.context_rows = 0
        self.draft_seconds = self.context_seconds = 0.0
        return wall, times
