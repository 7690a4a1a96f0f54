"""What became of the drafts that slots hold, on the device.

One program goes through the batch, so that all ranks of a tensor-parallel group add up in the same
order, and know the same to the last bit: they choose drafts independently of each other.
"""

from __future__ import annotations

from math import log2

import torch
from vllm.triton_utils import tl, triton

from vllm_dflash.engine.v2.draft_slots import DraftSlots
from vllm_dflash.planning.ahead import BLOCK, NOBODY, TEXT
from vllm_dflash.planning.chances import GLOBAL_MEMORY, REQUEST_MEMORY

OUTCOME_COLUMNS = 6
"""Before the drafts' confidence: source, drafts admitted, tokens matched, tokens predicted, how
many of those are known by now, and how many of them came true."""
TILE = 32
"""Requests at a time."""


@triton.jit
def _learn(  # type: ignore[no-untyped-def]
    bias,  # [S + 1, 2], of blocks or of texts
    slot,  # [TILE]
    is_graded,  # [TILE]
    survival,  # [TILE, PADDED_K], 0 where nothing is compared
    accepted,  # [TILE]
    MEMORY: tl.constexpr,
):
    """Into the requests' biases; returns how many there are, and the sum of their pairs, [2]."""
    pair = tl.arange(0, 2)[None, :]
    expected = tl.sum(survival, axis=1)
    came = tl.where(pair == 0, expected[:, None], accepted.to(tl.float32)[:, None])
    at = bias + 2 * slot[:, None] + pair
    old = tl.load(at, mask=is_graded[:, None], other=0.0)
    tl.store(at, MEMORY * old + came, mask=is_graded[:, None])
    return tl.sum(is_graded.to(tl.int32)), tl.sum(tl.where(is_graded[:, None], came, 0.0), axis=0)


@triton.jit
def _learn_of_everybody(bias, count, came, LOG_MEMORY: tl.constexpr):  # type: ignore[no-untyped-def]
    """`bias` and `came`: pairs."""
    at = bias + tl.arange(0, 2)
    tl.store(at, tl.exp2(LOG_MEMORY * count.to(tl.float32)) * tl.load(at) + came)


@triton.jit(do_not_specialize=["stride_texts", "num_requests", "num_slots"])
def _grade(  # type: ignore[no-untyped-def]
    idx_mapping,  # [R]
    num_sampled,  # [R]
    num_rejected,  # [R]
    texts,  # [S, L]
    total_len,  # [S]
    outcomes,  # [max R, OUTCOME_COLUMNS + K]
    source,  # [S]
    confidence,  # [S, K]
    block_survival,  # [S, K]
    text_survival,  # [S, K]
    matches,  # [S]
    text_lengths,  # [S]
    text_tokens,  # [S, K]
    bias,  # [2, S + 1, 2]
    stride_texts,
    num_requests,
    num_slots,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    REQUEST_MEMORY: tl.constexpr,
    LOG_GLOBAL_MEMORY: tl.constexpr,
    NOBODY: tl.constexpr,
    BLOCK: tl.constexpr,
    TEXT: tl.constexpr,
    TILE: tl.constexpr,
):
    draft = tl.arange(0, PADDED_K)[None, :]
    text_bias = bias + 2 * (num_slots + 1)
    num_blocks = tl.full([], 0, tl.int32)
    num_texts = tl.full([], 0, tl.int32)
    of_blocks = tl.zeros([2], tl.float32)
    of_texts = tl.zeros([2], tl.float32)
    for first in range(0, num_requests, TILE):
        request = first + tl.arange(0, TILE)
        is_request = request < num_requests
        slot = tl.load(idx_mapping + request, mask=is_request, other=0).to(tl.int64)
        sampled = tl.load(num_sampled + request, mask=is_request, other=0)
        rejected = tl.load(num_rejected + request, mask=is_request, other=0)
        holds = tl.load(source + slot, mask=is_request, other=NOBODY)
        length = tl.load(text_lengths + slot, mask=is_request, other=0)
        end = tl.load(total_len + slot, mask=is_request, other=0)
        match = tl.load(matches + slot, mask=is_request, other=0)

        admitted = tl.where((sampled > 0) & (holds != NOBODY), sampled - 1 + rejected, 0)
        is_block = (holds == BLOCK) & (admitted > 0)
        is_text = (holds == TEXT) & (admitted > 0)
        # How many tokens a step has got says how easy they were; so where the text's drafts were
        # not verified themselves, only the first one tells.
        known = tl.where(is_text, tl.minimum(sampled, length), 1)
        known = tl.where((sampled > 0) & (length > 0), known, 0)
        compared = tl.where(is_text, admitted, 1)
        at = slot[:, None] * K + draft
        is_known = draft < known[:, None]
        token = tl.load(
            texts + slot[:, None] * stride_texts + (end - sampled)[:, None] + draft,
            mask=is_known,
            other=-1,
        )
        is_wrong = is_known & (token != tl.load(text_tokens + at, mask=is_known, other=-1))
        came_true = tl.min(tl.where(is_wrong, draft, known[:, None]), axis=1)

        is_draft = is_request[:, None] & (draft < K)
        is_verified = is_draft & is_block[:, None] & (draft < admitted[:, None])
        survival = tl.load(block_survival + at, mask=is_verified, other=0.0)
        count, came = _learn(bias, slot, is_block, survival, sampled - 1, REQUEST_MEMORY)
        num_blocks += count
        of_blocks += came
        is_compared = is_draft & (known > 0)[:, None] & (draft < compared[:, None])
        survival = tl.load(text_survival + at, mask=is_compared, other=0.0)
        true_ones = tl.minimum(came_true, compared)
        count, came = _learn(text_bias, slot, known > 0, survival, true_ones, REQUEST_MEMORY)
        num_texts += count
        of_texts += came

        row = outcomes + request * (COLUMNS + K)
        tl.store(row, holds.to(tl.float32), mask=is_request)
        tl.store(row + 1, admitted.to(tl.float32), mask=is_request)
        tl.store(row + 2, match.to(tl.float32), mask=is_request)
        tl.store(row + 3, length.to(tl.float32), mask=is_request)
        tl.store(row + 4, known.to(tl.float32), mask=is_request)
        tl.store(row + 5, came_true.to(tl.float32), mask=is_request)
        sure = tl.load(confidence + at, mask=is_draft, other=0.0)
        tl.store(row[:, None] + COLUMNS + draft, sure, mask=is_draft)
        tl.debug_barrier()  # several threads read what one of them writes
        tl.store(source + slot, tl.full([TILE], NOBODY, tl.int32), mask=is_request)
        tl.store(text_lengths + slot, tl.zeros([TILE], tl.int32), mask=is_request)
    _learn_of_everybody(bias + 2 * num_slots, num_blocks, of_blocks, LOG_GLOBAL_MEMORY)
    _learn_of_everybody(text_bias + 2 * num_slots, num_texts, of_texts, LOG_GLOBAL_MEMORY)


def grade(
    slots: DraftSlots,
    idx_mapping: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    texts: torch.Tensor,
    total_len: torch.Tensor,
    outcomes: torch.Tensor,
) -> None:
    """Learn from the drafts of R requests, report them, and let go of them.

    Args:
        slots: of all requests.
        idx_mapping: the slot of each request, [R].
        num_sampled: tokens that it got in this step, [R].
        num_rejected: its drafts that were rejected, [R].
        texts: of all slots, with this step's tokens, [S, L] int32.
        total_len: tokens that each has, [S] int32.
        outcomes: its first R rows are written, [max R, OUTCOME_COLUMNS + K] float32.
    """
    num_slots, width = slots.confidence.shape
    _grade[(1,)](
        idx_mapping,
        num_sampled,
        num_rejected,
        texts,
        total_len,
        outcomes,
        *slots.of_drafts(),
        texts.stride(0),
        len(idx_mapping),
        num_slots,
        K=width,
        PADDED_K=triton.next_power_of_2(width),
        COLUMNS=OUTCOME_COLUMNS,
        REQUEST_MEMORY=REQUEST_MEMORY,
        LOG_GLOBAL_MEMORY=log2(GLOBAL_MEMORY),
        NOBODY=NOBODY,
        BLOCK=BLOCK,
        TEXT=TEXT,
        TILE=TILE,
    )
