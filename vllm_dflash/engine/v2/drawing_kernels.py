"""The kernel of `drawing.py`: accepts the drafts that are the tokens drawn before them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from vllm.triton_utils import tl, triton
from vllm.utils.math_utils import next_power_of_2


# vLLM verifies large batches in parts: slices, whose alignment varies.
@triton.jit(
    do_not_specialize=["stride_sampled"],
    do_not_specialize_on_alignment=["drafts", "ends", "slots"],
)
def _accept(  # type: ignore[no-untyped-def]
    drawn,  # [Q], in and out
    drafts,  # [Q]
    ends,  # [R + 1]
    slots,  # [R]
    seq_lens,  # [R] or None
    prefill_lens,  # [S]
    sampled,  # out, [R, 1 + W]
    num_sampled,  # out, [R]
    num_rejected,  # out, [R]
    stride_sampled,
    V: tl.constexpr,
    PADDED_W: tl.constexpr,
):
    request = tl.program_id(0)
    first = tl.load(ends + request)
    count = tl.load(ends + request + 1) - first
    each = tl.arange(0, PADDED_W)
    is_row = each < count
    # If all logits of a row are NaN, the -inf after them may win.
    token = tl.minimum(tl.load(drawn + first + each, mask=is_row, other=0), V - 1)
    tl.store(drawn + first + each, token, mask=is_row)
    tl.store(sampled + request * stride_sampled + each, token, mask=is_row)

    # The draft after a row is the next row's token.
    draft = tl.load(drafts + first + each + 1, mask=each + 1 < count, other=-1)
    is_accepted = draft == token
    found = 1 + tl.min(tl.where(is_accepted, PADDED_W, each), axis=0)
    rejected = count - found
    if seq_lens is not None:
        prefill_len = tl.load(prefill_lens + tl.load(slots + request))
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


def accept(
    drawn: torch.Tensor,
    drafts: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor | None,
    prefill_lens: torch.Tensor,
    *,
    vocab_size: int,
    width: int,
) -> Verified:
    """Accept the drafts of R requests that are the tokens drawn before them.

    Args:
        drawn: token drawn after each of Q rows; out: none is beyond the vocabulary, [Q] int64.
        drafts: token of each row; -1 is never accepted, [Q].
        ends: 0, then where each request's rows end, [R + 1].
        slots: slot of each request, [R].
        seq_lens: length of each request; those still in their prompts get no token, [R]. None:
            vLLM sees to that.
        prefill_lens: length of each slot's prompt, [S].
        vocab_size: number of tokens.
        width: most tokens of a request, 1 + W.
    """
    count, new = len(slots), slots.new_empty
    # Not rows of one tensor: their alignment would depend on R, and Triton compiles by it.
    found = Verified(
        drawn,
        new(count, width, dtype=torch.int64),
        new(count, dtype=torch.int32),
        new(count, dtype=torch.int32),
    )
    _accept[(count,)](
        drawn,
        drafts,
        ends,
        slots,
        seq_lens,
        prefill_lens,
        found.sampled,
        found.num_sampled,
        found.num_rejected,
        width,
        V=vocab_size,
        PADDED_W=next_power_of_2(width),
        num_warps=1,
    )
    return found
