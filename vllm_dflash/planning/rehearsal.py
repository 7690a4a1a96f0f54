"""Compiles what planning needs, before any request waits for it.

python -m vllm_dflash.planning.rehearsal v1
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from pathlib import Path

import numba
import numpy as np

from vllm_dflash.planning.ahead import AheadPlanner
from vllm_dflash.planning.compiled import FOLDER
from vllm_dflash.planning.costs import Attention, StepCosts
from vllm_dflash.planning.curves import Curve
from vllm_dflash.planning.planner import Planner
from vllm_dflash.planning.step import BLOCK, TEXT, Outcomes, StepRecord
from vllm_dflash.planning.texts import NgramIndex, append_tokens

CHEAP, DEAR = 0.0, 1.0
"""Seconds of a block that is always worth it, and of one that never is."""


def rehearse(runner: str, max_draft: int, most_free: int) -> None:
    """Compile what planning needs on a model runner: `v1` or `v2`."""
    if runner == "v2":
        rehearse_ahead(max_draft)
    else:
        rehearse_planner(max_draft, most_free)


def is_rehearsed(runner: str) -> bool:
    """Return whether all was compiled before, or cannot be kept."""
    try:
        Path(FOLDER).mkdir(parents=True, exist_ok=True)
        return _note(runner).exists() or not os.access(FOLDER, os.W_OK)
    except OSError:
        return True


def _note(runner: str) -> Path:
    """Return a file named after all that numba checks; other installations have other files."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    found = [(str(one), one.stat().st_mtime, one.stat().st_size) for one in sources]
    digest = hashlib.sha256(repr([sys.version, numba.__version__, found]).encode())
    return Path(FOLDER) / f"rehearsed-{runner}-{digest.hexdigest()[:16]}"


def _end_with(parent: int) -> None:
    """Exit once the parent has: an engine that was killed has no use for what is compiled here."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def rehearse_planner(max_draft: int, most_free: int) -> None:
    """Plan some steps of a made-up engine, with numbers of the same types as a real one's."""
    for block_seconds in (CHEAP, DEAR):
        planner = Planner(max_draft, 2, _costs(block_seconds), most_free=most_free)
        texts = np.zeros((2, 64), np.int32)
        matches = NgramIndex(2, 64, most_free)
        for produced in (1, 2, 1):
            step = _step(produced)
            if most_free:
                context, limits = np.full(2, 8), np.full(2, 64)
                append_tokens(texts, context, np.zeros((2, 2), np.int32), step.produced)
                step.predicted = matches.look_up(
                    step.ids, texts, context, step.produced, limits, most_free
                )
                step.agreed = np.ones(2, np.int64)
            step.plan = planner.plan(step)
            confidence = np.ones((int(step.plan.drafted.sum()), step.plan.width))
            if step.plan.width or step.plan.uses_text:
                planner.decide_lengths(step, confidence)
            if step.plan.width:
                step.draft_rows = step.context_rows = 2
            planner.observe(step)


def rehearse_ahead(max_draft: int) -> None:
    """Plan some steps ahead in the same way."""
    nothing, one = np.zeros(2, np.int64), np.ones(2, np.int64)
    for block_seconds in (CHEAP, DEAR):
        planner = AheadPlanner(max_draft, 2)
        planner.start(_costs(block_seconds), range(max_draft + 1))
        for source in (one * BLOCK, one * TEXT, nothing):
            planner.plan(["a", "b"], np.array([0, 10]))
            confidence = np.full((2, max_draft), 0.5) * (source == BLOCK)[:, None]
            became = source, one, 2 * one, one, one, one, one, one
            if_cut = np.zeros((2, 0), np.int64)
            planner.observe(_step(2), Outcomes(*became, confidence, if_cut))


def _costs(block_seconds: float) -> StepCosts:
    counts = np.array([1, 2])
    step, block, free = (
        Curve.of(counts, np.full(2, seconds)) for seconds in (1.0, block_seconds, 0.0)
    )
    # One of the two requests has too long a context to be drafted.
    return StepCosts.of(step, block, free, 2, Attention(block=1.0))


def _step(produced: int) -> StepRecord:
    verified = np.full(2, produced - 1)
    step = StepRecord(["a", "b"], np.full(2, produced), 2 * produced, verified)
    step.limits = np.full(2, 2)
    step.context_lens = np.array([0, 10])
    step.target_seconds = 1.0
    return step


if __name__ == "__main__":
    threading.Thread(target=_end_with, args=[os.getppid()], daemon=True).start()
    # Types do not depend on how long drafts are.
    rehearse(sys.argv[1], max_draft=7, most_free=32)
    _note(sys.argv[1]).touch()
