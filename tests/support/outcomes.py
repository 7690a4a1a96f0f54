"""Outcomes of drafts as a device reports them, made by hand."""

from __future__ import annotations

import numpy as np

from vllm_dflash.planning.step import BLOCK, NO_DRAFTS, Outcomes


def outcomes_of(
    admitted: list[int],
    width: int,
    *,
    source: int = BLOCK,
    confidence: float = 0.0,
    matches: int = 0,
    lengths: int = 0,
    num_observed: list[int] | None = None,
    num_correct: list[int] | None = None,
    accepted: list[int] | None = None,
) -> Outcomes:
    """Return outcomes of R requests with drafts of one kind; the others have none (`NO_DRAFTS`)."""
    count = len(admitted)
    drafts = np.array(admitted)
    nothing = np.zeros(count, np.int64)
    return Outcomes(
        np.where(drafts > 0, source, NO_DRAFTS),
        drafts,
        np.full(count, matches),
        np.full(count, lengths),
        nothing if num_observed is None else np.array(num_observed),
        nothing if num_correct is None else np.array(num_correct),
        drafts,
        nothing if accepted is None else np.array(accepted),
        np.full((count, width), confidence),
        np.zeros((count, 0), np.int64),
    )
