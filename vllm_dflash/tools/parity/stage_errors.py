"""How far two tensors are apart."""

from __future__ import annotations

import math

import torch


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference in a row, relative to the row's largest number; of the worst row.

    Row by row, since targets have rows (the first token's) a thousand times as large as others,
    beside which an error of another row would vanish. Infinite where a number is not finite.

    Args:
        got: [..., N].
        expected: of the same shape.
    """
    if got.shape != expected.shape:
        raise ValueError(f"shapes differ: {list(got.shape)} and {list(expected.shape)}")
    if not got.numel():
        return 0.0
    got, expected = got.float(), expected.float()
    difference = (got - expected).abs().amax(-1)
    scale = expected.abs().amax(-1)
    # A row of zeros that ought to be one is right.
    error = torch.where(difference == 0, 0.0, difference / scale).max().item()
    return error if math.isfinite(error) else math.inf


def gap_to_best(logits: torch.Tensor, columns: torch.Tensor) -> float:
    """How far logits of the chosen columns lie below the best, relative to the row's largest.

    0 where each choice is the most likely one, or as likely; of the worst row.

    Args:
        logits: [K, V].
        columns: a choice for each row, [K].
    """
    if not logits.numel():
        return 0.0
    logits = logits.float()
    chosen = logits.gather(-1, columns.long()[:, None])[:, 0]
    gap = ((logits.amax(-1) - chosen) / logits.abs().amax(-1)).max().item()
    return gap if math.isfinite(gap) else math.inf


def share_of(wrong: torch.Tensor) -> float:
    """Share of a boolean tensor that is true; 0 of none."""
    return float(wrong.float().mean()) if wrong.numel() else 0.0


def count_non_finite(*tensors: torch.Tensor | None) -> int:
    """NaN and infinite numbers in all of them."""
    return sum(int((~torch.isfinite(t)).sum()) for t in tensors if t is not None)
