"""Time every proposer's draft step, from the sampled tokens to lists of drafts.

Both functions run in a worker, sent there by `LLM.collective_rpc`, which asks for
VLLM_ALLOW_INSECURE_SERIALIZATION=1.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def watch_drafting(worker: Any) -> None:
    """Count and time draft steps from now on.

    Proposers return lists or tensors; handing a tensor over is part of the time.
    """
    runner = worker.model_runner
    worker.drafting = [0, 0.0]

    def watch(name: str, *, counts: bool) -> None:
        original: Callable[..., Any] = getattr(runner, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            result = original(*arguments, **named)
            worker.drafting[0] += counts
            worker.drafting[1] += time.perf_counter() - started
            return result

        setattr(runner, name, timed)

    watch("propose_draft_token_ids", counts=True)
    watch("_copy_draft_token_ids_to_cpu", counts=False)
    watch("take_draft_token_ids", counts=False)


def read_drafting(worker: Any) -> tuple[int, float]:
    """Calls and seconds since `watch_drafting`."""
    return tuple(worker.drafting)
