"""How often an engine plans: not in every step where steps take milliseconds.

Planning takes the host some tenths of a millisecond, and an engine on a fast GPU takes hardly
longer for a whole step. A plan for a batch still holds a tenth of a second later.
"""

from __future__ import annotations

from math import ceil

MOST_TIME = 0.01
"""Share of the engine's time that planning may take."""
MOST_STEPS = 32
"""Most steps between two plans."""
CHANGED = 1 / 8
"""Change of the batch size, relative to the planned one, beyond which a plan no longer holds."""
SOON = 4
"""Steps after an experiment that are all planned and learned from: they show what came of it."""
WEIGHT = 0.2
"""Weight of the newest step in the mean times."""


class Cadence:
    """Decides which steps of an engine are planned anew and learned from."""

    def __init__(self) -> None:
        self._planning = self._step = 0.0
        self._steps_left = self._soon = self._passed = 0
        self._num_requests = 0

    def is_due(self, num_requests: int) -> bool:
        """Return whether to plan the step being scheduled, which has `num_requests` requests."""
        self._steps_left -= 1
        self._soon -= 1
        self._passed += 1
        has_changed = abs(num_requests - self._num_requests) > CHANGED * self._num_requests
        if self._steps_left > 0 and self._soon < 0 and not has_changed:
            return False
        self._steps_left, self._num_requests = self.interval(), num_requests
        return True

    def interval(self) -> int:
        """Return the number of steps from one plan to the next, by the time that planning takes."""
        if not self._step:
            return 1
        return min(max(ceil(self._planning / (MOST_TIME * self._step)), 1), MOST_STEPS)

    def take_steps_since_plan(self) -> int:
        """Return the number of steps since this was last called, at most `MOST_STEPS`."""
        steps, self._passed = self._passed, 0
        return min(steps, MOST_STEPS)

    def watch(self) -> None:
        """Note that an experiment was planned: the next steps show what came of it."""
        self._soon = SOON

    def record_times(self, planning_seconds: float, step_seconds: float) -> None:
        """Record the seconds of a planned step: of planning and learning, and in total (0: not
        known)."""
        if step_seconds:
            weight = WEIGHT if self._step else 1.0
            self._planning += weight * (planning_seconds - self._planning)
            self._step += weight * (step_seconds - self._step)
