"""Whose drafts a request gets, and how likely each is to be accepted, decided on the device.

Drafts are the tokens that a drafter thinks likeliest, or those that followed the same words before:
none is drawn at random. A chance follows from what was known before the draft's own place was
sampled: from the text, from the drafter's distributions and from what became of earlier drafts. It
never looks at a token sampled for that place. So which drafts are tried, and how many, says nothing
about the token that the target is going to draw there, and the target's distribution is untouched.
"""

from __future__ import annotations

import torch
from vllm.triton_utils import tl, triton

from vllm_dflash.engine.v2.draft_slots import DraftSlots
from vllm_dflash.engine.v2.text_look_up import TextLookUp
from vllm_dflash.planning.ahead import BLOCK, NOBODY, TEXT
from vllm_dflash.planning.chances import AGREEMENT, BIAS_PRIOR_TOKENS


@triton.jit
def _acceptance(rates, knots, draft, confidence, is_draft, NUM_KNOTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Chances [K] of drafts if those before them are accepted: linear between the knots."""
    knot = tl.zeros_like(draft)
    for each in range(1, NUM_KNOTS - 1):
        knot += (confidence >= tl.load(knots + each)).to(tl.int32)
    lower, upper = tl.load(knots + knot), tl.load(knots + knot + 1)
    at = rates + draft * NUM_KNOTS + knot
    low = tl.load(at, mask=is_draft, other=0.0)
    high = tl.load(at + 1, mask=is_draft, other=0.0)
    return tl.where(is_draft, low + (confidence - lower) / (upper - lower) * (high - low), 0.0)


@triton.jit
def _bias_of(bias, slot, num_slots, PRIOR: tl.constexpr):  # type: ignore[no-untyped-def]
    """Accepted against expected tokens of a request, shrunk to everybody's; `bias` [S + 1, 2]."""
    everybody = bias + 2 * num_slots
    of_everybody = (tl.load(everybody + 1) + PRIOR) / (tl.load(everybody) + PRIOR)
    own = bias + 2 * slot
    return (tl.load(own + 1) + PRIOR * of_everybody) / (tl.load(own) + PRIOR)


@triton.jit(do_not_specialize=["num_slots"])
def _choose(  # type: ignore[no-untyped-def]
    idx_mapping,  # [R]
    num_sampled,  # [R]
    last_sampled,  # [S, 1]
    drafts,  # [max R, K]
    block_confidence,  # [max R, K]
    found_tokens,  # [max R, K]
    found_lengths,  # [max R]
    found_matches,  # [max R]
    chances,  # [max R, K]
    source,  # [S]
    confidence,  # [S, K]
    block_survival,  # [S, K]
    text_survival,  # [S, K]
    matches,  # [S]
    text_lengths,  # [S]
    text_tokens,  # [S, K]
    bias,  # [2, S + 1, 2]
    rates,  # [2, K, knots]
    trust,  # [MOST_TRUST + 1]
    knots,
    num_slots,
    HAS_BLOCK: tl.constexpr,
    HAS_TEXT: tl.constexpr,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    NUM_KNOTS: tl.constexpr,
    MOST_TRUST: tl.constexpr,
    AGREEMENT: tl.constexpr,
    PRIOR: tl.constexpr,
    NOBODY: tl.constexpr,
    BLOCK: tl.constexpr,
    TEXT: tl.constexpr,
):
    request = tl.program_id(0)
    slot = tl.load(idx_mapping + request).to(tl.int64)
    is_running = tl.load(num_sampled + request) > 0
    draft = tl.arange(0, PADDED_K)
    is_place = draft < K
    row, own = request * K + draft, slot * K + draft
    given = tl.load(drafts + row, mask=is_place, other=0)
    last = tl.load(last_sampled + slot)

    sure = tl.zeros([PADDED_K], tl.float32)
    chance_of_block = tl.zeros([PADDED_K], tl.float32)
    if HAS_BLOCK:
        sure = tl.load(block_confidence + row, mask=is_place & is_running, other=0.0)
        sure = tl.where(sure > 0, sure, 0.0)  # where logits were not finite there is no draft
        chance_of_block = _acceptance(rates, knots, draft, sure, is_place & (sure > 0), NUM_KNOTS)
    survival_of_block = tl.cumprod(chance_of_block, axis=0)
    bias_of_block = _bias_of(bias, slot, num_slots, PRIOR)

    match, length, predicted = 0, 0, last + tl.zeros_like(given)
    chance_of_text = tl.zeros([PADDED_K], tl.float32)
    if HAS_TEXT:
        match = tl.where(is_running, tl.load(found_matches + request), 0)
        length = tl.where(is_running, tl.load(found_lengths + request), 0)
        is_predicted = is_place & (draft < length)
        predicted = tl.load(found_tokens + row, mask=is_predicted, other=0)
        predicted = tl.where(is_predicted, predicted, last)
        if HAS_BLOCK:
            match += AGREEMENT * tl.min(
                tl.where(is_predicted & (predicted == given), PADDED_K, draft), axis=0
            )
        trusted = tl.load(trust + tl.minimum(match + draft, MOST_TRUST))
        rates_of_text = rates + K * NUM_KNOTS
        chance_of_text = _acceptance(rates_of_text, knots, draft, trusted, is_predicted, NUM_KNOTS)
    survival_of_text = tl.cumprod(chance_of_text, axis=0)
    bias_of_text = _bias_of(bias + 2 * (num_slots + 1), slot, num_slots, PRIOR)

    block_promises = tl.sum(tl.minimum(survival_of_block * bias_of_block, 1.0), axis=0)
    text_promises = tl.sum(tl.minimum(survival_of_text * bias_of_text, 1.0), axis=0)
    uses_text = text_promises > block_promises
    chance = tl.where(uses_text, chance_of_text, chance_of_block)
    survival = tl.where(uses_text, survival_of_text, survival_of_block)
    chosen_bias = tl.where(uses_text, bias_of_text, bias_of_block)
    corrected = tl.minimum(survival * chosen_bias, 1.0)
    # What is handed over is multiplied up again: corrected by that of the draft before.
    before = tl.minimum(survival / tl.where(chance > 0, chance, 1.0) * chosen_bias, 1.0)
    before = tl.where((draft == 0) | (corrected == 0.0), 1.0, before)
    tokens = tl.where(uses_text, predicted, given if HAS_BLOCK else last)
    chosen = tl.where(uses_text, TEXT, BLOCK if HAS_BLOCK else NOBODY)

    tl.debug_barrier()  # several threads read what one of them writes
    tl.store(drafts + row, tokens, mask=is_place & is_running)
    tl.store(chances + row, tl.minimum(corrected / before, 1.0), mask=is_place)
    tl.store(source + slot, tl.where(is_running, chosen, NOBODY))
    tl.store(confidence + own, sure, mask=is_place)
    tl.store(block_survival + own, survival_of_block, mask=is_place)
    tl.store(text_survival + own, survival_of_text, mask=is_place)
    tl.store(matches + slot, match)
    tl.store(text_lengths + slot, length)
    tl.store(text_tokens + own, predicted, mask=is_place)


def choose(
    slots: DraftSlots,
    idx_mapping: torch.Tensor,
    num_sampled: torch.Tensor,
    last_sampled: torch.Tensor,
    drafts: torch.Tensor,
    confidence: torch.Tensor | None,
    found: TextLookUp | None,
    chances: torch.Tensor,
) -> None:
    """Write drafts and chances of R requests, and into `slots` what grading them takes.

    Args:
        slots: of all requests.
        idx_mapping: the slot of each request, [R].
        num_sampled: tokens that it got in this step, [R]; 0: it is still in its prompt.
        last_sampled: newest token of each slot, [S, 1] int64.
        drafts: in: tokens of the blocks; out: those chosen, [max R, K] int64.
        confidence: of the blocks' tokens, [max R, K] float32, 0 where logits were not finite; None:
            no block was run.
        found: what the texts predict; None: nothing was looked up.
        chances: of each draft, if those before it are accepted, [max R, K] float32.
    """
    num_slots, width = slots.confidence.shape
    _choose[(len(idx_mapping),)](
        idx_mapping,
        num_sampled,
        last_sampled,
        drafts,
        confidence,
        *((None, None, None) if found is None else (found.tokens, found.lengths, found.matches)),
        chances,
        *slots.of_drafts(),
        slots.rates,
        slots.trust,
        slots.knots,
        num_slots,
        HAS_BLOCK=confidence is not None,
        HAS_TEXT=found is not None,
        K=width,
        PADDED_K=triton.next_power_of_2(width),
        NUM_KNOTS=len(slots.knots),
        MOST_TRUST=len(slots.trust) - 1,
        AGREEMENT=AGREEMENT,
        PRIOR=BIAS_PRIOR_TOKENS,
        NOBODY=NOBODY,
        BLOCK=BLOCK,
        TEXT=TEXT,
        num_warps=1,
    )
