"""Grades on the device the drafts that slots hold: what was accepted, and what to learn from it.

Each request has its own program, which also writes the request to where captured graphs find it. A
second kernel, captured, adds up the sums of all requests, in the same order on all ranks of a
tensor-parallel group: ranks choose drafts independently, so their ratios must agree to the last
bit.
"""

from __future__ import annotations

from math import log2

import torch
from vllm.triton_utils import tl, triton
from vllm.utils.math_utils import next_power_of_2

from vllm_dflash.config.engine_options import TREE_CUTS
from vllm_dflash.engine.v2.draft_slots import NUM_RECORD_FIELDS, Batch, DraftSlots
from vllm_dflash.planning.acceptance import GLOBAL_MEMORY, REQUEST_MEMORY
from vllm_dflash.planning.step import BLOCK, COUNTS, NO_DRAFTS, TEXT

OUTCOME_COLUMNS = COUNTS + len(TREE_CUTS)
"""Columns before the drafts' confidence: the other fields of `Outcomes`, in order. Confidence is -1
if a draft was not finite."""
TILE = 128
"""Requests whose sums are added at once."""


@triton.jit
def _learn(counts, sums, is_graded, expected, observed, MEMORY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Update what a request's ratio is made of, and write to `sums` what the ratio of all requests
    learns: 1, then what was expected of its drafts, and what was observed; zeros if nothing is
    graded."""
    graded, expected = is_graded.to(tl.float32), tl.sum(expected, axis=0)
    observed = tl.where(is_graded, observed, 0).to(tl.float32)
    fading = tl.where(is_graded, MEMORY, 1.0)
    tl.store(counts, fading * tl.load(counts) + expected)
    tl.store(counts + 1, fading * tl.load(counts + 1) + observed)
    tl.store(sums, graded)
    tl.store(sums + 1, expected)
    tl.store(sums + 2, observed)


@triton.jit(do_not_specialize=["num_requests"])
def _learn_overall(  # type: ignore[no-untyped-def]
    slots,  # [R]
    num_sampled,  # [R]
    outcomes,  # [max R, COLUMNS + K]
    sums,  # [max R, 2, 3]
    overall,  # [2, 2]
    counts,  # [2, 4]
    num_requests,
    LOG_MEMORY: tl.constexpr,
    TILE: tl.constexpr,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    TEXT: tl.constexpr,
):
    kind = tl.program_id(0)
    source = tl.where(kind == 0, BLOCK, TEXT)
    count = tl.zeros([TILE], tl.float32)
    expected = tl.zeros([TILE], tl.float32)
    observed = tl.zeros([TILE], tl.float32)
    verifications = tl.zeros([TILE], tl.int64)
    drafts = tl.zeros([TILE], tl.int64)
    accepted = tl.zeros([TILE], tl.int64)
    not_finite = tl.zeros([TILE], tl.int64)
    draft = tl.arange(0, PADDED_K)[None, :]
    for first in range(0, num_requests, TILE):
        request = first + tl.arange(0, TILE)
        is_row = request < num_requests
        is_request = is_row & (tl.load(slots + request, mask=is_row, other=-1) >= 0)
        at = sums + 6 * request + 3 * kind
        count += tl.load(at, mask=is_request, other=0.0)
        expected += tl.load(at + 1, mask=is_request, other=0.0)
        observed += tl.load(at + 2, mask=is_request, other=0.0)

        outcome = outcomes + (COLUMNS + K) * request
        is_source = tl.load(outcome, mask=is_request, other=-1.0).to(tl.int32) == source
        verified = tl.load(outcome + 1, mask=is_source, other=0.0).to(tl.int64)
        verifications += (verified > 0).to(tl.int64)
        drafts += verified
        sampled = tl.load(num_sampled + request, mask=is_source, other=0).to(tl.int64)
        accepted += tl.where(verified > 0, sampled - 1, 0)
        is_draft = is_request[:, None] & (draft < K)
        confidence = tl.load(outcome[:, None] + COLUMNS + draft, mask=is_draft, other=0.0)
        not_finite += tl.sum((confidence < 0.0).to(tl.int64), axis=1)
    memory, of_all = tl.exp2(LOG_MEMORY * tl.sum(count, axis=0)), overall + 2 * kind
    tl.store(of_all, memory * tl.load(of_all) + tl.sum(expected, axis=0))
    tl.store(of_all + 1, memory * tl.load(of_all + 1) + tl.sum(observed, axis=0))
    counts += 4 * kind
    tl.store(counts, tl.load(counts) + tl.sum(verifications, axis=0))
    tl.store(counts + 1, tl.load(counts + 1) + tl.sum(drafts, axis=0))
    tl.store(counts + 2, tl.load(counts + 2) + tl.sum(accepted, axis=0))
    if kind == 0:  # only blocks have confidence
        tl.store(counts + 3, tl.load(counts + 3) + tl.sum(not_finite, axis=0))


@triton.jit(do_not_specialize=["stride_texts", "num_requests"])
def _grade(  # type: ignore[no-untyped-def]
    slots,  # [R]
    num_sampled,  # [R]
    num_rejected,  # [R]
    texts,  # [S, L]
    text_lens,  # [S]
    records,  # [S, NUM_RECORD_FIELDS + 3 * K]
    sums,  # [max R, 2, 3]: out, for blocks and for texts, see `_learn`
    outcomes,  # [max R, COLUMNS + K]
    chains,  # [max R, 2 + CUTS] or None
    batch_slots,  # [ROWS]: out, `slots`, and -1 after them
    batch_num_sampled,  # [ROWS]: out, `num_sampled`, and 0 after them
    counts,  # [2, 4]
    counts_before,  # [2, 4]: out, `counts` before this step
    stride_texts,
    num_requests,
    ROWS: tl.constexpr,
    NUM_RECORD_FIELDS: tl.constexpr,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    CUTS: tl.constexpr,
    REQUEST_MEMORY: tl.constexpr,
    NO_DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TEXT: tl.constexpr,
):
    request, draft = tl.program_id(0), tl.arange(0, PADDED_K)
    slot = tl.load(slots + request).to(tl.int64)
    sampled = tl.load(num_sampled + request)
    rejected = tl.load(num_rejected + request)
    tl.store(batch_slots + request, slot)
    tl.store(batch_num_sampled + request, sampled)
    if request == 0:
        padding = num_requests + tl.arange(0, ROWS)
        tl.store(batch_slots + padding, -1, mask=padding < ROWS)
        tl.store(batch_num_sampled + padding, 0, mask=padding < ROWS)
        each = tl.arange(0, 8)
        tl.store(counts_before + each, tl.load(counts + each))
    end = tl.load(text_lens + slot)
    record = records + slot * (NUM_RECORD_FIELDS + 3 * K)
    holds = tl.load(record).to(tl.int32)
    match = tl.load(record + 1)

    # A budget larger than the number of drafts admits placeholders, which `verified` leaves out.
    admitted = tl.where(sampled > 0, sampled - 1 + rejected, 0)
    verified = tl.where(holds != NO_DRAFTS, admitted, 0)
    is_block = (holds == BLOCK) & (verified > 0)
    is_text = (holds == TEXT) & (verified > 0)
    # A request may have draft slots for a tree, but a chain of K drafts in them.
    in_chain = tl.minimum(verified, K)
    accepted = tl.minimum(tl.where(verified > 0, sampled - 1, 0), K)
    if chains is not None:
        row_of_tree = chains + (2 + CUTS) * request
        of_tree = tl.load(row_of_tree)
        is_tree = is_block & (of_tree >= 0)
        in_chain = tl.where(is_tree, of_tree, in_chain)
        accepted = tl.where(is_tree, tl.load(row_of_tree + 1), accepted)
    # The number of tokens that a step got depends on how easy they were. So unless the text's
    # drafts were themselves verified, only the first prediction is compared.
    num_observed = tl.where(is_text, tl.minimum(sampled, K), 1)
    num_observed = tl.where((sampled > 0) & (match > 0), num_observed, 0)
    num_compared = tl.where(is_text, verified, 1)
    of_drafts = record + NUM_RECORD_FIELDS + draft
    is_observed = draft < num_observed
    newest = texts + slot * stride_texts + (end - sampled) + draft
    token = tl.load(newest, mask=is_observed, other=-1)
    predicted = tl.load(of_drafts + 2 * K, mask=is_observed, other=-1.0).to(tl.int32)
    is_wrong = is_observed & (token != predicted)
    num_correct = tl.min(tl.where(is_wrong, draft, num_observed), axis=0)

    is_draft = draft < K
    # Tried are the accepted drafts and the first rejected one (`planning.acceptance`).
    tried = tl.minimum(accepted + 1, in_chain)
    confidence = tl.load(of_drafts, mask=is_draft & is_block & (draft < tried), other=0.0)
    sums += 6 * request
    _learn(record + 2, sums, is_block, tl.maximum(confidence, 0.0), accepted, REQUEST_MEMORY)
    true_ones = tl.minimum(num_correct, num_compared)
    tried = tl.minimum(true_ones + 1, tl.minimum(num_compared, K))
    is_tried = is_draft & (num_observed > 0) & (draft < tried)
    trusted = tl.load(of_drafts + K, mask=is_tried, other=1.0)
    _learn(record + 4, sums + 3, num_observed > 0, 1.0 - trusted, tried - true_ones, REQUEST_MEMORY)

    row = outcomes + request * (COLUMNS + K)
    tl.store(row, holds.to(tl.float32))
    tl.store(row + 1, admitted.to(tl.float32))
    tl.store(row + 2, match)
    tl.store(row + 3, tl.where(match > 0, K, 0).to(tl.float32))
    tl.store(row + 4, num_observed.to(tl.float32))
    tl.store(row + 5, num_correct.to(tl.float32))
    tl.store(row + 6, in_chain.to(tl.float32))
    tl.store(row + 7, accepted.to(tl.float32))
    for cut in tl.static_range(CUTS):
        tokens_if_truncated = tl.full([], 0, tl.int32)
        if chains is not None:
            tokens_if_truncated = tl.load(row_of_tree + 2 + cut, mask=is_tree, other=0)
        tl.store(row + COLUMNS - CUTS + cut, tokens_if_truncated.to(tl.float32))
    confidence = tl.load(of_drafts, mask=is_draft, other=0.0)
    tl.store(row + COLUMNS + draft, confidence, mask=is_draft)
    tl.debug_barrier()  # several threads read what one of them writes
    tl.store(record, tl.full([], NO_DRAFTS, tl.float32))
    tl.store(record + 1, tl.full([], 0.0, tl.float32))


def grade(
    slots: DraftSlots,
    batch: Batch,
    idx_mapping: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    outcomes: torch.Tensor,
    chains: torch.Tensor | None = None,
) -> None:
    """Learn from the drafts of R requests, report their outcomes, and clear them.

    Args:
        slots: drafts of all request slots.
        batch: in: texts; out: slots and sampled tokens of these requests.
        idx_mapping: vLLM's slot of each request, [R] int64.
        num_sampled: tokens that each got, [R] int32.
        num_rejected: rejected drafts of each, [R] int32.
        outcomes: out: the first R rows, [max R, OUTCOME_COLUMNS + K] float32.
        chains: see `TreeSlots.chains`; None: no drafts were trees.
    """
    width, count = slots.width, len(idx_mapping)
    _grade[(count,)](
        idx_mapping,
        num_sampled,
        num_rejected,
        batch.texts,
        batch.text_lens,
        slots.records,
        slots.sums,
        outcomes,
        chains,
        batch.slots,
        batch.num_sampled,
        slots.counts,
        slots.counts_before,
        batch.texts.stride(0),
        count,
        ROWS=len(batch.slots),
        NUM_RECORD_FIELDS=NUM_RECORD_FIELDS,
        K=width,
        PADDED_K=next_power_of_2(width),
        COLUMNS=OUTCOME_COLUMNS,
        CUTS=len(TREE_CUTS),
        REQUEST_MEMORY=REQUEST_MEMORY,
        NO_DRAFTS=NO_DRAFTS,
        BLOCK=BLOCK,
        TEXT=TEXT,
        num_warps=1,
    )


def learn_overall(slots: DraftSlots, batch: Batch, outcomes: torch.Tensor) -> None:
    """Add up what R requests have learned from their outcomes, and count these. Captured."""
    _learn_overall[(2,)](
        batch.slots,
        batch.num_sampled,
        outcomes,
        slots.sums,
        slots.overall,
        slots.counts,
        len(batch.slots),
        LOG_MEMORY=log2(GLOBAL_MEMORY),
        TILE=TILE,
        K=slots.width,
        PADDED_K=next_power_of_2(slots.width),
        COLUMNS=OUTCOME_COLUMNS,
        BLOCK=BLOCK,
        TEXT=TEXT,
    )
