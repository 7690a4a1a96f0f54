"""Noise that drafts are drawn with: that of the draws which verify them.

Verification adds noise to the target's logits, by the request's seed, the position and the token,
and takes the largest (`drawing.py`). Drafts take the largest of the drafter's logits with the same
noise. So where drafter and target agree, they draw the same token, also where none is likely. A
draft of the most likely token would be accepted with the target's probability of it.

A Gumbel coupling (arXiv 2408.07978). No draw of verification depends on drafts, so the text is the
same. Only for verification that draws: rejection sampling needs drafts that are independent of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.sample.gumbel import gumbel_noised_argmax


class DraftNoise(NamedTuple):
    """Where the noise of Q rows comes from."""

    row_slots: torch.Tensor
    """Slot of each row's request, [Q] int64; -1: none."""
    positions: torch.Tensor
    """Position before the token that each row predicts, [Q] int64."""
    temperatures: torch.Tensor
    """Temperature of each slot; at 0 there is no noise, [S] float32."""
    seeds: torch.Tensor
    """Seed of each slot, [S] int64."""
    d2t: torch.Tensor | None
    """What to add to a column of logits to get the target's token, [V']; None: nothing."""
    use_fp64: bool
    """Precision of the noise."""


@triton.jit
def _noise(  # type: ignore[no-untyped-def]
    tokens,  # [Q, C]
    row_slots,  # [Q]
    positions,  # [Q]
    temperatures,  # [S]
    seeds,  # [S]
    noise,  # out, [Q, C]
    C: tl.constexpr,
    USE_FP64: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(row_slots + row)
    temperature = tl.load(temperatures + slot, mask=slot >= 0, other=0.0).to(tl.float32)
    seed = tl.load(seeds + slot, mask=slot >= 0, other=0)
    one = tl.arange(0, 1)
    for each in range(C):
        at = row * C + each + one
        value, _ = gumbel_noised_argmax(
            tl.zeros([1], dtype=tl.float32),
            tl.load(tokens + at),
            one < 1,
            seed,
            tl.load(positions + row),
            temperature,
            IS_DRAFTING=False,
            USE_FP64=USE_FP64,
        )
        tl.store(noise + at, value.to(tl.float32) * temperature)


def noise_of(tokens: torch.Tensor, noise: DraftNoise) -> torch.Tensor:
    """What to add to the logits of some tokens, [Q, C] -> [Q, C] float32. May be captured.

    The largest sum is the token that verification draws from the same logits. 0 at temperature 0.
    """
    found = torch.empty(tokens.shape, device=tokens.device)
    rows = noise.row_slots, noise.positions, noise.temperatures, noise.seeds
    _noise[(len(tokens),)](
        tokens.contiguous(), *rows, found, C=tokens.shape[1], USE_FP64=noise.use_fp64, num_warps=1
    )
    return found
