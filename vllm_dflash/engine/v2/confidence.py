"""How sure the drafter is of each token, on the device."""

from __future__ import annotations

import torch

CONFIDENCE_ROWS = 512
"""Rows of logits that are turned into probabilities at a time, in float32."""


def write_confidence(logits: torch.Tensor, best: torch.Tensor, out: torch.Tensor) -> None:
    """Probability of each row's likeliest token. May be captured.

    Args:
        logits: of Q rows, [Q, V].
        best: their maxima, [Q].
        out: its first Q are written; -1 where a row's logits are not finite.
    """
    for start in range(0, len(best), CONFIDENCE_ROWS):
        rows = slice(start, min(start + CONFIDENCE_ROWS, len(best)))
        probability = torch.exp(best[rows].float() - logits[rows].float().logsumexp(dim=-1))
        out[rows] = torch.where(torch.isfinite(best[rows]), probability, -1.0)
