"""Draft windows in V2's schedulers: chosen for all workers when a step is scheduled.

A step's output says what became of the blocks of the step before, and how long they took.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from vllm_dflash.engine.v2.exchange import Directions
from vllm_dflash.planning import Ints
from vllm_dflash.planning.ahead import AheadPlanner
from vllm_dflash.planning.window import WHOLE, Window, WindowChooser


class WindowsAhead:
    """Chooses the window of each step with a block, and learns from outputs, in order."""

    def __init__(self, longest: int, planner: AheadPlanner) -> None:
        """Choose for contexts of up to `longest` tokens, and tell the planner."""
        self.chooser, self._planner = WindowChooser(longest), planner
        self._window = WHOLE
        """Window of the last step that was scheduled with a block."""
        self._steps = 0
        """Steps with a block since a window was last chosen."""
        self._last: tuple[Window, int, bool] | None = None
        """Window and requests of the last finished step's blocks, and whether the step had prompts;
        None: it had no blocks."""

    def direct(self, directions: Directions, context_lens: Callable[[], Ints]) -> Directions:
        """Add the window to the directions for a step; `context_lens`: tokens by request, [R]."""
        if not directions.runs_block:
            return directions
        self._steps += 1
        if directions.has_new_plan:
            chosen = self.chooser.choose(context_lens(), self._steps)
            self._planner.use_window(chosen)
            self._window, self._steps = chosen.window, 0
        return replace(directions, window=self._window)

    def observe(
        self,
        directions: Directions,
        produced: list[int],
        verified: list[tuple[int, int]],
        seconds: float,
        block_seconds: float | None,
        *,
        has_prompts: bool = False,
    ) -> None:
        """Learn from the output of a step of R requests.

        Args:
            directions: those of this step.
            produced: tokens that each request got, [R].
            verified: verified drafts of each, and how many of these were free, [R].
            seconds: time since the last output; 0: not known.
            block_seconds: time of the last step's blocks, and of storing that step's context; None:
                not known.
            has_prompts: whether prompts took part in the step: its time, and the next block time,
                then say nothing about windows.
        """
        last = self._last
        self._last = None
        if directions.runs_block:
            self._last = directions.window, len(produced), has_prompts
        if last is None:
            return
        window, num_blocks, had_prompts = last
        accepted = [
            tokens - 1
            for tokens, (count, free) in zip(produced, verified, strict=True)
            if tokens and count and not free
        ]
        self.chooser.observe_drafts(window, len(accepted), sum(accepted))
        if seconds and block_seconds is not None and not (has_prompts or had_prompts):
            rest = max(seconds - block_seconds, 0.0)
            self.chooser.observe_seconds(window, num_blocks, block_seconds, rest)
