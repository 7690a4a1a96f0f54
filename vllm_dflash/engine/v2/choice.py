"""Takes each request's drafts from its block or its text, and estimates each draft's chance.

Whatever is chosen, the text does not change: verification draws what plain decoding would, and no
draw reads a draft (`drawing.py`). Where vLLM verifies by rejection instead, no draft is drawn, and
the chance of a draft depends on the text, the drafter's distributions and the outcomes of earlier
drafts, never on a token sampled for its own position. So the target's distribution is unchanged.
"""

from __future__ import annotations

from vllm.triton_utils import tl, triton
from vllm.utils.math_utils import next_power_of_2

from vllm_dflash.engine.v2.draft_slots import NUM_RECORD_FIELDS, Batch, Drafts, DraftSlots
from vllm_dflash.engine.v2.text_look_up import TextLookUp
from vllm_dflash.planning.acceptance import PRIOR_TOKENS
from vllm_dflash.planning.step import BLOCK, NO_DRAFTS, TEXT


@triton.jit
def ratio_of(counts, overall, PRIOR: tl.constexpr):  # type: ignore[no-untyped-def]
    """Ratio of what became of a request's drafts to what was expected, shrunk towards that of all
    requests: of a block's accepted drafts, or a text's rejected ones (`planning.acceptance`)."""
    of_all = (tl.load(overall + 1) + PRIOR) / (tl.load(overall) + PRIOR)
    return (tl.load(counts + 1) + PRIOR * of_all) / (tl.load(counts) + PRIOR)


@triton.jit
def _choose(  # type: ignore[no-untyped-def]
    slots,  # [R]
    num_sampled,  # [R]
    newest,  # [S, 1]
    drafts,  # [max R, K]
    block_confidence,  # [max R, K]
    chances,  # [max R, K]
    found_tokens,  # [max R, K]
    found_matches,  # [max R]
    records,  # [S, NUM_RECORD_FIELDS + 3 * K]
    overall,  # [2, 2]
    trust,  # [MOST_TRUST + 1]
    HAS_BLOCK: tl.constexpr,
    HAS_TEXT: tl.constexpr,
    NUM_RECORD_FIELDS: tl.constexpr,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    MOST_TRUST: tl.constexpr,
    PRIOR: tl.constexpr,
    NO_DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TEXT: tl.constexpr,
):
    request = tl.program_id(0)
    slot = tl.load(slots + request).to(tl.int64)
    if slot < 0:  # a graph's row past the batch
        return
    is_running = tl.load(num_sampled + request) > 0
    draft = tl.arange(0, PADDED_K)
    is_draft = draft < K
    row, record = request * K + draft, records + slot * (NUM_RECORD_FIELDS + 3 * K)
    given = tl.load(drafts + row, mask=is_draft, other=0)
    last = tl.load(newest + slot)

    confidence = tl.zeros([PADDED_K], tl.float32)
    chance_of_block = tl.zeros([PADDED_K], tl.float32)
    if HAS_BLOCK:
        confidence = tl.load(block_confidence + row, mask=is_draft & is_running, other=0.0)
        is_finite = is_draft & (confidence > 0)  # no draft if its logits were not finite
        chance_of_block = tl.where(is_finite, confidence, 0.0)
        confidence = tl.where(is_finite, confidence, tl.where(is_running, -1.0, 0.0))
    chance_of_block = tl.minimum(ratio_of(record + 2, overall, PRIOR) * chance_of_block, 1.0)

    match, predicted = tl.full([], 0, tl.int32), last + tl.zeros_like(given)
    trusted = tl.zeros([PADDED_K], tl.float32)
    if HAS_TEXT:
        match = tl.where(is_running, tl.load(found_matches + request), 0)
        is_predicted = is_draft & (match > 0)
        predicted = tl.load(found_tokens + row, mask=is_predicted, other=0)
        predicted = tl.where(match > 0, predicted, last)
        trusted = tl.load(trust + tl.minimum(match + draft, MOST_TRUST))
        trusted = tl.where(is_predicted, trusted, 0.0)
    chance_of_text = 1.0 - ratio_of(record + 4, overall + 2, PRIOR) * (1.0 - trusted)
    chance_of_text = tl.where(trusted > 0.0, tl.maximum(chance_of_text, 0.0), 0.0)

    of_block, of_text = tl.cumprod(chance_of_block, axis=0), tl.cumprod(chance_of_text, axis=0)
    uses_text = tl.sum(of_text, axis=0) > tl.sum(of_block, axis=0)
    chance = tl.where(uses_text, chance_of_text, chance_of_block)
    tokens = tl.where(uses_text, predicted, given if HAS_BLOCK else last)
    chosen = tl.where(uses_text, TEXT, BLOCK if HAS_BLOCK else NO_DRAFTS)

    tl.debug_barrier()  # several threads read what one of them writes
    tl.store(drafts + row, tokens, mask=is_draft & is_running)
    tl.store(chances + row, chance, mask=is_draft)
    tl.store(record, tl.where(is_running, chosen, NO_DRAFTS).to(tl.float32))
    tl.store(record + 1, match.to(tl.float32))
    of_drafts = record + NUM_RECORD_FIELDS + draft
    tl.store(of_drafts, confidence, mask=is_draft)
    tl.store(of_drafts + K, trusted, mask=is_draft)
    tl.store(of_drafts + 2 * K, predicted.to(tl.float32), mask=is_draft)


def choose(
    slots: DraftSlots, batch: Batch, drafts: Drafts, found: TextLookUp | None, *, has_block: bool
) -> None:
    """Write a batch's drafts and chances, and record in `slots` what grading them needs. Captured.

    `drafts`: in: tokens and confidence of the blocks; out: the chosen tokens and their chances.
    `found`: what the texts predict; None: nothing was looked up.
    """
    width = slots.width
    _choose[(len(batch.slots),)](
        batch.slots,
        batch.num_sampled,
        batch.newest,
        *drafts,
        *((None, None) if found is None else (found.tokens, found.matches)),
        slots.records,
        slots.overall,
        slots.trust,
        HAS_BLOCK=has_block,
        HAS_TEXT=found is not None,
        NUM_RECORD_FIELDS=NUM_RECORD_FIELDS,
        K=width,
        PADDED_K=next_power_of_2(width),
        MOST_TRUST=len(slots.trust) - 1,
        PRIOR=PRIOR_TOKENS,
        NO_DRAFTS=NO_DRAFTS,
        BLOCK=BLOCK,
        TEXT=TEXT,
        num_warps=1,
    )
