"""How often Model Runner V2 plans: where a step takes milliseconds, not in every one.

Planning takes the host a millisecond or two, and an engine on a fast GPU has hardly more for a
whole step. What was planned for a batch still holds a tenth of a second later.
"""

from __future__ import annotations

from math import ceil

MOST_TIME = 0.01
"""Share of the engine's time that planning may take."""
MOST_STEPS = 32
"""Between two plans."""
CHANGED = 1 / 8
"""Share of the requests that come or go: a plan for a batch of another size does not hold."""
SOON = 4
"""Steps that are all planned and learned from behind a probe, which show what came of it."""
WEIGHT = 0.2
"""Share of the newest step in the mean times."""


class Cadence:
    """Says which steps of an engine are planned anew, and learned from."""

    def __init__(self) -> None:
        self._planning = self._step = 0.0
        self._steps_left = self._soon = 0
        self._num_requests = 0

    def is_due(self, num_requests: int) -> bool:
        """Whether to plan the step that is scheduled, which has so many requests."""
        self._steps_left -= 1
        self._soon -= 1
        has_changed = abs(num_requests - self._num_requests) > CHANGED * self._num_requests
        if self._steps_left > 0 and self._soon < 0 and not has_changed:
            return False
        wanted = ceil(self._planning / (MOST_TIME * self._step)) if self._step else 1
        self._steps_left = min(max(wanted, 1), MOST_STEPS)
        self._num_requests = num_requests
        return True

    @property
    def steps(self) -> int:
        """How many a plan that is made now is to hold for, as a rule."""
        return max(self._steps_left, 1)

    def watch(self) -> None:
        """A probe was planned: the next steps show what came of it."""
        self._soon = SOON

    def observe(self, planning_seconds: float, step_seconds: float) -> None:
        """Take note of what a planned step took: to plan and learn, and altogether, 0 if that is
        not known."""
        if step_seconds:
            weight = WEIGHT if self._step else 1.0
            self._planning += weight * (planning_seconds - self._planning)
            self._step += weight * (step_seconds - self._step)
