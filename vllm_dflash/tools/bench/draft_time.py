"""Time every proposer's draft step, from the sampled tokens to lists of drafts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class TimedDrafting:
    """Given to every worker of an engine (`worker_extension_cls`), whoever drafts in it."""

    model_runner: Any

    def time_drafting(self) -> None:
        """Count and time draft steps from now on.

        Proposers return lists or tensors; handing a tensor over is part of the time.
        """
        runner = self.model_runner
        self._draft_calls, self._draft_seconds = 0, 0.0

        def watch(name: str, *, counts: bool) -> None:
            original: Callable[..., Any] = getattr(runner, name)

            def timed(*arguments: Any, **named: Any) -> Any:
                started = time.perf_counter()
                result = original(*arguments, **named)
                self._draft_calls += counts
                self._draft_seconds += time.perf_counter() - started
                return result

            setattr(runner, name, timed)

        watch("propose_draft_token_ids", counts=True)
        watch("_copy_draft_token_ids_to_cpu", counts=False)
        watch("take_draft_token_ids", counts=False)

    def drafting_time(self) -> tuple[int, float]:
        """Calls and seconds since `time_drafting`."""
        return self._draft_calls, self._draft_seconds


TIMED = f"{TimedDrafting.__module__}.{TimedDrafting.__qualname__}"
