"""The two kernels of `drawing.py`: draw a token after each row, and accept the drafts drawn."""

from __future__ import annotations

from typing import NamedTuple

import torch
from vllm.triton_utils import tl, triton
from vllm.utils.math_utils import next_power_of_2
from vllm.v1.worker.gpu.sample.gumbel import gumbel_noised_argmax

TILE = 8192
"""Maximum number of columns of logits that a program reads."""
NOBODY = tl.constexpr(1 << 30)
"""More than any token id."""


# vLLM verifies large batches in parts: slices, whose alignment varies.
@triton.jit(
    do_not_specialize=["stride_logits", "num_tiles"],
    do_not_specialize_on_alignment=["logits", "row_slots", "positions"],
)
def _draw(  # type: ignore[no-untyped-def]
    logits,  # [Q, V]
    row_slots,  # [Q]
    rows,  # [Q] or None
    positions,  # [T] or [Q]
    temperatures,  # [S]
    seeds,  # [S]
    values,  # out, [Q, tiles]
    tokens,  # out, [Q, tiles]
    stride_logits,
    num_tiles,
    V: tl.constexpr,
    TILE: tl.constexpr,
    USE_FP64: tl.constexpr,
):
    each, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tile * TILE + tl.arange(0, TILE)
    is_token = column < V
    logit = tl.load(logits + each * stride_logits + column, mask=is_token, other=float("-inf"))
    slot, row = tl.load(row_slots + each), each
    if rows is not None:
        row = tl.load(rows + each).to(tl.int64)
    value, index = gumbel_noised_argmax(
        logit.to(tl.float32),
        column,
        is_token,
        tl.load(seeds + slot),
        tl.load(positions + row),
        tl.load(temperatures + slot).to(tl.float32),
        IS_DRAFTING=False,
        USE_FP64=USE_FP64,
        APPLY_TEMPERATURE=False,
    )
    tl.store(values + each * num_tiles + tile, value)
    # Where all logits are NaN, the -inf after them may win.
    tl.store(tokens + each * num_tiles + tile, tl.minimum(tile * TILE + index, V - 1))


@triton.jit(
    do_not_specialize=["num_tiles", "stride_sampled"],
    do_not_specialize_on_alignment=["drafts", "positions", "ends", "slots"],
)
def _accept(  # type: ignore[no-untyped-def]
    values,  # [Q, tiles]
    tokens,  # [Q, tiles]
    rows,  # [Q] or None
    drafts,  # [T] or [Q]
    positions,  # [T] or [Q]
    ends,  # [R + 1]
    slots,  # [R]
    seq_lens,  # [R] or None
    prefill_lens,  # [S]
    drawn,  # out, [Q]
    sampled,  # out, [R, 1 + W]
    num_sampled,  # out, [R]
    num_rejected,  # out, [R]
    num_tiles,
    stride_sampled,
    PADDED_W: tl.constexpr,
    PADDED_TILES: tl.constexpr,
    NOBODY: tl.constexpr,
):
    request = tl.program_id(0)
    first = tl.load(ends + request)
    count = tl.load(ends + request + 1) - first
    prefill_len = tl.load(prefill_lens + tl.load(slots + request))
    each = tl.arange(0, PADDED_W)
    is_row = each < count
    tile = tl.arange(0, PADDED_TILES)[None, :]
    at = (first + each)[:, None].to(tl.int64) * num_tiles + tile
    is_part = is_row[:, None] & (tile < num_tiles)
    value = tl.load(values + at, mask=is_part, other=float("-inf"))
    token = tl.load(tokens + at, mask=is_part, other=0)
    best = tl.max(value, axis=1)
    token = tl.min(tl.where(value == best[:, None], token, NOBODY), axis=1)
    token = tl.where(token < NOBODY, token, 0)  # NaN equals nothing
    tl.store(drawn + first + each, token.to(tl.int64), mask=is_row)
    tl.store(sampled + request * stride_sampled + each, token.to(tl.int64), mask=is_row)

    # The draft after a row is the next row's token. Those of a request that was still in its prompt
    # are vLLM's placeholders.
    has_draft = each + 1 < count
    row = first + each + 1
    if rows is not None:
        row = tl.load(rows + row, mask=has_draft, other=0)
    draft = tl.load(drafts + row, mask=has_draft, other=-1).to(tl.int32)
    start = tl.load(positions + row, mask=has_draft, other=0) - (each + 1)
    is_accepted = has_draft & (start >= prefill_len) & (draft == token.to(tl.int32))
    found = 1 + tl.min(tl.where(is_accepted, PADDED_W, each), axis=0)
    rejected = count - found
    if seq_lens is not None:
        is_partial = tl.load(seq_lens + request) < prefill_len  # a chunk of a prompt
        found = tl.where(is_partial, 0, found)
        rejected = tl.where(is_partial, 0, rejected)
    tl.store(num_sampled + request, found)
    tl.store(num_rejected + request, rejected)


class Verified(NamedTuple):
    """Tokens of R requests in a step with Q rows of logits."""

    drawn: torch.Tensor
    """Token drawn after each row, [Q] int64."""
    sampled: torch.Tensor
    """Tokens of each request, [R, 1 + W] int64; those past `num_sampled` mean nothing."""
    num_sampled: torch.Tensor
    """Number of these, [R] int32."""
    num_rejected: torch.Tensor
    """Drafts that were not accepted, [R] int32."""


class Drawn(NamedTuple):
    """Tokens drawn in each tile of the vocabulary, [Q, tiles] each; the largest value wins."""

    values: torch.Tensor
    """Logit plus noise, float32 or float64."""
    tokens: torch.Tensor
    """int32."""


def draw(
    logits: torch.Tensor,
    row_slots: torch.Tensor,
    rows: torch.Tensor | None,
    positions: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    *,
    use_fp64: bool,
) -> Drawn:
    """Draw a token after each of Q rows, as vLLM's `gumbel_sample` does.

    Args:
        logits: logits to draw from, with temperature applied, [Q, V].
        row_slots: slot of each row's request, [Q].
        rows: number of each row in the batch, [Q]; None: they are the batch.
        positions: position of each of the batch's rows, [T].
        temperatures: temperature of each slot; at 0 the most likely token is taken, [S].
        seeds: seed of each slot, [S].
        use_fp64: dtype of the noise.
    """
    num_rows, vocab_size = logits.shape
    tile = min(TILE, next_power_of_2(vocab_size))
    num_tiles = triton.cdiv(vocab_size, tile)
    shape = num_rows, num_tiles
    drawn = Drawn(
        logits.new_empty(shape, dtype=torch.float64 if use_fp64 else torch.float32),
        logits.new_empty(shape, dtype=torch.int32),
    )
    _draw[shape](
        logits,
        row_slots,
        rows,
        positions,
        temperatures,
        seeds,
        *drawn,
        logits.stride(0),
        num_tiles,
        V=vocab_size,
        TILE=tile,
        USE_FP64=use_fp64,
    )
    return drawn


def accept(
    drawn: Drawn,
    rows: torch.Tensor | None,
    drafts: torch.Tensor,
    positions: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor | None,
    prefill_lens: torch.Tensor,
    *,
    width: int,
) -> Verified:
    """Accept the drafts of R requests that are the tokens drawn before them.

    Args:
        drawn: what was drawn after each of Q rows.
        rows: as for `draw`.
        drafts: token of each of the batch's rows; -1 is never accepted, [T].
        positions: as for `draw`.
        ends: 0, then where each request's rows end, [R + 1].
        slots: slot of each request, [R].
        seq_lens: length of each request; those still in their prompts get no token, [R]. None:
            vLLM sees to that.
        prefill_lens: length of each slot's prompt, [S].
        width: most tokens of a request, 1 + W.
    """
    (num_rows, num_tiles), count, new = drawn.values.shape, len(slots), slots.new_empty
    # Not rows of one tensor: their alignment would depend on R, and Triton compiles by it.
    found = Verified(
        new(num_rows, dtype=torch.int64),
        new(count, width, dtype=torch.int64),
        new(count, dtype=torch.int32),
        new(count, dtype=torch.int32),
    )
    _accept[(count,)](
        *drawn,
        rows,
        drafts,
        positions,
        ends,
        slots,
        seq_lens,
        prefill_lens,
        *found,
        num_tiles,
        width,
        PADDED_W=next_power_of_2(width),
        PADDED_TILES=next_power_of_2(num_tiles),
        NOBODY=NOBODY,
        num_warps=1,
    )
    return found
