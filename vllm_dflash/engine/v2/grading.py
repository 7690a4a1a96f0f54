"""What became of the drafts that slots hold, on the device.

One program goes through the batch, so that all ranks of a tensor-parallel group add up in the same
order, and know the same to the last bit: they choose drafts independently of each other.
"""

from __future__ import annotations

from math import log2

import torch
from vllm.triton_utils import tl, triton

from vllm_dflash.config.mode import TREE_CUTS
from vllm_dflash.engine.v2.draft_slots import HEAD, Batch, DraftSlots
from vllm_dflash.planning.chances import GLOBAL_MEMORY, REQUEST_MEMORY
from vllm_dflash.planning.step import BLOCK, NOBODY, TEXT

OUTCOME_COLUMNS = 8 + len(TREE_CUTS)
"""Before the drafts' confidence: source, drafts admitted, tokens matched, tokens predicted, how
many of those are known by now, and how many of them came true, and of a block's likeliest drafts,
which of a chain are all and of a tree a part, how many were admitted and accepted; and what trees
would have brought had they been cut, by `TREE_CUTS`. Confidence is -1 where a draft was not finite.
"""
TILE = 32
"""Requests at a time."""


@triton.jit
def _learn(  # type: ignore[no-untyped-def]
    bias,  # [TILE]
    is_graded,  # [TILE]
    survival,  # [TILE, PADDED_K], 0 where nothing is compared
    accepted,  # [TILE]
    MEMORY: tl.constexpr,
):
    """Into the requests' biases; returns how many there are, and the sum of their pairs, [2]."""
    pair = tl.arange(0, 2)[None, :]
    expected = tl.sum(survival, axis=1)
    came = tl.where(pair == 0, expected[:, None], accepted.to(tl.float32)[:, None])
    at = bias[:, None] + pair
    old = tl.load(at, mask=is_graded[:, None], other=0.0)
    tl.store(at, MEMORY * old + came, mask=is_graded[:, None])
    return tl.sum(is_graded.to(tl.int32)), tl.sum(tl.where(is_graded[:, None], came, 0.0), axis=0)


@triton.jit
def _learn_of_everybody(bias, count, came, LOG_MEMORY: tl.constexpr):  # type: ignore[no-untyped-def]
    """`bias` and `came`: pairs."""
    at = bias + tl.arange(0, 2)
    tl.store(at, tl.exp2(LOG_MEMORY * count.to(tl.float32)) * tl.load(at) + came)


@triton.jit(do_not_specialize=["stride_texts", "num_requests"])
def _grade(  # type: ignore[no-untyped-def]
    slots,  # [R]
    num_sampled,  # [R]
    num_rejected,  # [R]
    texts,  # [S, L]
    text_lens,  # [S]
    records,  # [S, HEAD + 4 * K]
    everybody,  # [2, 2]
    outcomes,  # [max R, COLUMNS + K]
    chains,  # [max R, 2 + CUTS] or None
    stride_texts,
    num_requests,
    HEAD: tl.constexpr,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    CUTS: tl.constexpr,
    REQUEST_MEMORY: tl.constexpr,
    LOG_GLOBAL_MEMORY: tl.constexpr,
    NOBODY: tl.constexpr,
    BLOCK: tl.constexpr,
    TEXT: tl.constexpr,
    TILE: tl.constexpr,
):
    draft = tl.arange(0, PADDED_K)[None, :]
    num_blocks = tl.full([], 0, tl.int32)
    num_texts = tl.full([], 0, tl.int32)
    of_blocks = tl.zeros([2], tl.float32)
    of_texts = tl.zeros([2], tl.float32)
    for first in range(0, num_requests, TILE):
        request = first + tl.arange(0, TILE)
        is_request = request < num_requests
        slot = tl.load(slots + request, mask=is_request, other=0).to(tl.int64)
        sampled = tl.load(num_sampled + request, mask=is_request, other=0)
        rejected = tl.load(num_rejected + request, mask=is_request, other=0)
        end = tl.load(text_lens + slot, mask=is_request, other=0)
        record = records + slot * (HEAD + 4 * K)
        holds = tl.load(record, mask=is_request, other=NOBODY).to(tl.int32)
        match = tl.load(record + 1, mask=is_request, other=0.0)

        admitted = tl.where((sampled > 0) & (holds != NOBODY), sampled - 1 + rejected, 0)
        is_block = (holds == BLOCK) & (admitted > 0)
        is_text = (holds == TEXT) & (admitted > 0)
        # There may be places for a tree, and a chain in them.
        likeliest = tl.minimum(admitted, K)
        accepted = tl.minimum(tl.where(admitted > 0, sampled - 1, 0), K)
        if chains is not None:
            row_of_tree = chains + (2 + CUTS) * request
            of_tree = tl.load(row_of_tree, mask=is_request, other=-1)
            is_tree = is_block & (of_tree >= 0)
            came = tl.load(row_of_tree + 1, mask=is_request, other=0)
            likeliest = tl.where(is_tree, of_tree, likeliest)
            accepted = tl.where(is_tree, came, accepted)
        # How many tokens a step has got says how easy they were; so where the text's drafts were
        # not verified themselves, only the first one tells.
        known = tl.where(is_text, tl.minimum(sampled, K), 1)
        known = tl.where((sampled > 0) & (match > 0), known, 0)
        compared = tl.where(is_text, admitted, 1)
        of_drafts = record[:, None] + HEAD + draft
        is_known = draft < known[:, None]
        token = tl.load(
            texts + slot[:, None] * stride_texts + (end - sampled)[:, None] + draft,
            mask=is_known,
            other=-1,
        )
        predicted = tl.load(of_drafts + 3 * K, mask=is_known, other=-1.0).to(tl.int32)
        is_wrong = is_known & (token != predicted)
        came_true = tl.min(tl.where(is_wrong, draft, known[:, None]), axis=1)

        is_draft = is_request[:, None] & (draft < K)
        is_verified = is_draft & is_block[:, None] & (draft < likeliest[:, None])
        survival = tl.load(of_drafts + K, mask=is_verified, other=0.0)
        count, came = _learn(record + 2, is_block, survival, accepted, REQUEST_MEMORY)
        num_blocks += count
        of_blocks += came
        is_compared = is_draft & (known > 0)[:, None] & (draft < compared[:, None])
        survival = tl.load(of_drafts + 2 * K, mask=is_compared, other=0.0)
        true_ones = tl.minimum(came_true, compared)
        count, came = _learn(record + 4, known > 0, survival, true_ones, REQUEST_MEMORY)
        num_texts += count
        of_texts += came

        row = outcomes + request * (COLUMNS + K)
        tl.store(row, holds.to(tl.float32), mask=is_request)
        tl.store(row + 1, admitted.to(tl.float32), mask=is_request)
        tl.store(row + 2, match, mask=is_request)
        tl.store(row + 3, tl.where(match > 0, K, 0).to(tl.float32), mask=is_request)
        tl.store(row + 4, known.to(tl.float32), mask=is_request)
        tl.store(row + 5, came_true.to(tl.float32), mask=is_request)
        tl.store(row + 6, likeliest.to(tl.float32), mask=is_request)
        tl.store(row + 7, accepted.to(tl.float32), mask=is_request)
        for cut in tl.static_range(CUTS):
            if_cut = tl.zeros([TILE], tl.int32)
            if chains is not None:
                if_cut = tl.load(row_of_tree + 2 + cut, mask=is_request & is_tree, other=0)
            tl.store(row + 8 + cut, if_cut.to(tl.float32), mask=is_request)
        sure = tl.load(of_drafts, mask=is_draft, other=0.0)
        tl.store(row[:, None] + COLUMNS + draft, sure, mask=is_draft)
        tl.debug_barrier()  # several threads read what one of them writes
        tl.store(record, tl.full([TILE], NOBODY, tl.float32), mask=is_request)
        tl.store(record + 1, tl.zeros([TILE], tl.float32), mask=is_request)
    _learn_of_everybody(everybody, num_blocks, of_blocks, LOG_GLOBAL_MEMORY)
    _learn_of_everybody(everybody + 2, num_texts, of_texts, LOG_GLOBAL_MEMORY)


def grade(
    slots: DraftSlots, batch: Batch, outcomes: torch.Tensor, chains: torch.Tensor | None = None
) -> None:
    """Learn from the drafts of R requests, report them, and let go of them.

    Args:
        slots: of all requests.
        batch: of R requests.
        outcomes: its first R rows are written, [max R, OUTCOME_COLUMNS + K] float32.
        chains: see `TreeSlots.chains`; None: no drafts were trees.
    """
    width = slots.width
    _grade[(1,)](
        *batch[:5],
        slots.records,
        slots.everybody,
        outcomes,
        chains,
        batch.texts.stride(0),
        len(batch.slots),
        HEAD=HEAD,
        K=width,
        PADDED_K=triton.next_power_of_2(width),
        COLUMNS=OUTCOME_COLUMNS,
        CUTS=len(TREE_CUTS),
        REQUEST_MEMORY=REQUEST_MEMORY,
        LOG_GLOBAL_MEMORY=log2(GLOBAL_MEMORY),
        NOBODY=NOBODY,
        BLOCK=BLOCK,
        TEXT=TEXT,
        TILE=TILE,
    )
