"""Finds on the device the drafter's most likely tokens for each position, and their probabilities.

Logits are read once, in tiles; a maximum and a softmax would read them several times, in float32.
The most likely token comes from the tiles' maxima. Each of the other C - 1 takes one more read of a
tile, to replace the token that was taken from it. A draw comes from the same read as the most
likely token (`draft_noise.py`).
"""

from __future__ import annotations

import torch
from vllm.triton_utils import tl, triton
from vllm.utils.math_utils import next_power_of_2
from vllm.v1.worker.gpu.sample.gumbel import gumbel_noised_argmax

from vllm_dflash.engine.v2.draft_noise import DraftNoise

TILE = 4096
"""Maximum number of columns of logits that a program reads."""


@triton.jit(do_not_specialize=["num_tiles", "stride_parts"])
def _find_in_tiles(  # type: ignore[no-untyped-def]
    logits,  # [Q, V]
    parts,  # [3 or 5, Q, tiles]: maximum, its column, sum of exponentials; largest with noise, its
    # column
    row_slots,  # [Q]; None: nothing is drawn
    positions,  # [Q]
    temperatures,  # [S]
    seeds,  # [S]
    d2t,  # [V]; None: columns are the target's ids
    stride_logits,
    num_tiles,
    stride_parts,
    V: tl.constexpr,
    TILE: tl.constexpr,
    USE_FP64: tl.constexpr,
):
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tile * TILE + tl.arange(0, TILE)
    logit = tl.load(logits + row * stride_logits + column, mask=column < V, other=float("-inf"))
    logit = logit.to(tl.float32)
    is_nan = logit != logit
    logit = tl.where(is_nan, float("-inf"), logit)
    best = tl.max(logit, axis=0)
    first = tl.min(tl.where(logit == best, column, V), axis=0)
    total = tl.sum(tl.exp(logit - tl.where(tl.abs(best) < float("inf"), best, 0.0)), axis=0)
    has_nan = tl.max(is_nan.to(tl.int32), axis=0) > 0
    at = parts + row * num_tiles + tile
    tl.store(at, tl.where(has_nan, float("nan"), best))
    tl.store(at + stride_parts, first.to(tl.float32))  # exact up to 2^24
    tl.store(at + 2 * stride_parts, total)
    if row_slots is not None:
        slot, token = tl.load(row_slots + row), column
        if d2t is not None:
            token = column + tl.load(d2t + column, mask=column < V, other=0).to(tl.int32)
        value, index = gumbel_noised_argmax(
            logit,
            token,
            column < V,
            tl.load(seeds + slot, mask=slot >= 0, other=0),
            tl.load(positions + row),
            tl.load(temperatures + slot, mask=slot >= 0, other=0.0).to(tl.float32),
            IS_DRAFTING=False,  # the noise of verification
            USE_FP64=USE_FP64,
        )
        tl.store(at + 3 * stride_parts, value.to(tl.float32))
        tl.store(at + 4 * stride_parts, (tile * TILE + index).to(tl.float32))


@triton.jit(do_not_specialize=["num_tiles", "stride_parts"])
def _find_in_rows(  # type: ignore[no-untyped-def]
    logits,  # [Q, V]
    parts,  # [3 or 5, Q, tiles]
    tokens,  # [Q, C]
    confidence,  # [Q]
    probabilities,  # [Q, C]; None if C is 1
    stride_logits,
    num_tiles,
    stride_parts,
    PADDED_TILES: tl.constexpr,
    V: tl.constexpr,
    TILE: tl.constexpr,
    C: tl.constexpr,
    IS_DRAWN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, PADDED_TILES)
    at, is_tile = parts + row * num_tiles + tile, tile < num_tiles
    bests = tl.load(at, mask=is_tile, other=float("-inf"))
    columns = tl.load(at + stride_parts, mask=is_tile, other=0.0).to(tl.int32)
    totals = tl.load(at + 2 * stride_parts, mask=is_tile, other=0.0)
    is_nan = bests != bests
    bests = tl.where(is_nan, float("-inf"), bests)
    best = tl.max(bests, axis=0)
    is_finite = (tl.abs(best) < float("inf")) & (tl.max(is_nan.to(tl.int32), axis=0) == 0)
    total = tl.sum(totals * tl.exp(bests - best), axis=0)  # at least 1 if it is finite
    probability = tl.where(is_finite, 1.0 / total, 0.0)
    tl.store(confidence + row, probability)
    if IS_DRAWN:  # C is 1
        bests = tl.load(at + 3 * stride_parts, mask=is_tile, other=float("-inf"))
        columns = tl.load(at + 4 * stride_parts, mask=is_tile, other=0.0).to(tl.int32)
        best = tl.max(bests, axis=0)
    left = best
    for rank in range(C):
        column = tl.min(tl.where(bests == left, columns, V), axis=0)
        tl.store(tokens + row * C + rank, tl.where(is_finite, tl.minimum(column, V - 1), 0))
        if C > 1:
            share = tl.where(is_finite, probability * tl.exp(left - best), 0.0)
            tl.store(probabilities + row * C + rank, share)
            its_tile = column // TILE
            each = its_tile * TILE + tl.arange(0, TILE)
            is_there = (each < V) & (rank + 1 < C)
            its_logits = logits + row * stride_logits + each
            logit = tl.load(its_logits, mask=is_there, other=float("-inf")).to(tl.float32)
            # The tile without the tokens taken so far.
            is_left = (logit < left) | ((logit == left) & (each > column))
            logit = tl.where(is_left, logit, float("-inf"))
            next_best = tl.max(logit, axis=0)
            first = tl.min(tl.where(logit == next_best, each, V), axis=0)
            bests = tl.where(tile == its_tile, next_best, bests)
            columns = tl.where(tile == its_tile, first, columns)
            left = tl.max(bests, axis=0)


def find_argmax(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    confidence: torch.Tensor,
    probabilities: torch.Tensor | None = None,
    noise: DraftNoise | None = None,
) -> None:
    """Find the most likely tokens of each row, and their probabilities. May be captured.

    Args:
        logits: Q rows or more, [Q, V], any float dtype.
        tokens: out, [Q] int64, or [Q, C], most likely first; of equal ones, the first.
        confidence: out, [Q] float32, probability of the most likely token, above 0; 0 if the row's
            largest logit is not finite or any is NaN.
        probabilities: out, [Q, C] float32, 0 for rows whose confidence is 0; None: C is 1.
        noise: if given, C is 1 and `tokens` are drawn with it; confidence stays
            that of the most likely one.
    """
    assert logits.stride(1) == 1
    num_rows, vocab_size = len(tokens), logits.shape[1]
    tile = min(TILE, next_power_of_2(vocab_size))
    num_tiles = triton.cdiv(vocab_size, tile)
    parts = torch.empty(3 if noise is None else 5, num_rows, num_tiles, device=logits.device)
    sizes = num_tiles, num_rows * num_tiles
    drawing = (None,) * 5 if noise is None else noise[:5]
    _find_in_tiles[(num_rows, num_tiles)](
        logits,
        parts,
        *drawing,
        logits.stride(0),
        *sizes,
        V=vocab_size,
        TILE=tile,
        USE_FP64=noise is not None and noise.use_fp64,
    )
    num_tokens = 1 if probabilities is None else tokens.shape[1]
    _find_in_rows[(num_rows,)](
        logits,
        parts,
        tokens,
        confidence,
        probabilities,
        logits.stride(0),
        *sizes,
        PADDED_TILES=next_power_of_2(num_tiles),
        V=vocab_size,
        TILE=tile,
        C=num_tokens,
        IS_DRAWN=noise is not None,
        num_warps=1 if num_tokens == 1 else 8,
    )
