"""Swing: a closed loop whose number of clients changes from phase to phase."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_dflash.tools.loads.closed import ClosedLoop
from vllm_dflash.tools.stepped_engine import SteppedEngine


def measure_swing(
    engine: SteppedEngine, *, prompts: Sequence[str], phases: Sequence[tuple[int, int]], tokens: int
) -> dict[str, Any]:
    """Seconds of each phase. A phase is a concurrency and the tokens to emit until the next."""
    loop = ClosedLoop(engine, prompts, tokens)
    seconds = []
    for concurrency, work in phases:
        began = engine.now()
        loop.resize(concurrency)
        emitted = 0
        while emitted < work:
            emitted += sum(len(output.token_ids) for output in loop.step())
        # The last step does more than was left to do. Scaled, since the next phase's tokens cost
        # something else.
        seconds.append((engine.now() - began) * work / emitted)
    loop.close()
    return {"concurrency": [concurrency for concurrency, _ in phases], "seconds": seconds}
