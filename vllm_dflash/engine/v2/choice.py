"""Takes each request's drafts from its block or its text, and estimates each draft's chance.

Drafts are the drafter's likeliest tokens, or the tokens that followed the same words before: none
is drawn at random. A draft's chance depends only on what was known before its own position was
sampled: the text, the drafter's distributions and the outcomes of earlier drafts. It never depends
on a token sampled for that position. So which drafts are tried, and how many, says nothing about
the token that the target will draw there, and the target's distribution is unchanged.
"""

from __future__ import annotations

from vllm.triton_utils import tl, triton
from vllm.utils.math_utils import next_power_of_2

from vllm_dflash.engine.v2.draft_slots import HEAD, Batch, Drafts, DraftSlots
from vllm_dflash.engine.v2.text_look_up import TextLookUp
from vllm_dflash.planning.chances import AGREEMENT, BIAS_PRIOR_TOKENS
from vllm_dflash.planning.step import BLOCK, NO_DRAFTS, TEXT


@triton.jit
def acceptance_of(rates, knots, draft, confidence, is_draft, NUM_KNOTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Chances of drafts, given that those before them are accepted, [K]: linear between knots."""
    knot = tl.zeros_like(draft)
    for each in range(1, NUM_KNOTS - 1):
        knot += (confidence >= tl.load(knots + each)).to(tl.int32)
    lower, upper = tl.load(knots + knot), tl.load(knots + knot + 1)
    at = rates + draft * NUM_KNOTS + knot
    low = tl.load(at, mask=is_draft, other=0.0)
    high = tl.load(at + 1, mask=is_draft, other=0.0)
    return tl.where(is_draft, low + (confidence - lower) / (upper - lower) * (high - low), 0.0)


@triton.jit
def bias_of(bias, overall, PRIOR: tl.constexpr):  # type: ignore[no-untyped-def]
    """Ratio of a request's accepted to expected tokens, shrunk towards that of all requests."""
    of_all = (tl.load(overall + 1) + PRIOR) / (tl.load(overall) + PRIOR)
    return (tl.load(bias + 1) + PRIOR * of_all) / (tl.load(bias) + PRIOR)


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
    records,  # [S, HEAD + 4 * K]
    overall,  # [2, 2]
    rates,  # [2, K, knots]
    trust,  # [MOST_TRUST + 1]
    knots,
    HAS_BLOCK: tl.constexpr,
    HAS_TEXT: tl.constexpr,
    HEAD: tl.constexpr,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    NUM_KNOTS: tl.constexpr,
    MOST_TRUST: tl.constexpr,
    AGREEMENT: tl.constexpr,
    PRIOR: tl.constexpr,
    NO_DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TEXT: tl.constexpr,
):
    request = tl.program_id(0)
    slot = tl.load(slots + request).to(tl.int64)
    if slot < 0:  # a graph's row behind the batch
        return
    is_running = tl.load(num_sampled + request) > 0
    draft = tl.arange(0, PADDED_K)
    is_place = draft < K
    row, record = request * K + draft, records + slot * (HEAD + 4 * K)
    given = tl.load(drafts + row, mask=is_place, other=0)
    last = tl.load(newest + slot)

    sure = tl.zeros([PADDED_K], tl.float32)
    chance_of_block = tl.zeros([PADDED_K], tl.float32)
    if HAS_BLOCK:
        sure = tl.load(block_confidence + row, mask=is_place & is_running, other=0.0)
        is_finite = is_place & (sure > 0)  # no draft if its logits were not finite
        chance_of_block = acceptance_of(rates, knots, draft, sure, is_finite, NUM_KNOTS)
        sure = tl.where(is_finite, sure, tl.where(is_running, -1.0, 0.0))
    survival_of_block = tl.cumprod(chance_of_block, axis=0)
    bias_of_block = bias_of(record + 2, overall, PRIOR)

    match, predicted = tl.full([], 0, tl.int32), last + tl.zeros_like(given)
    chance_of_text = tl.zeros([PADDED_K], tl.float32)
    if HAS_TEXT:
        match = tl.where(is_running, tl.load(found_matches + request), 0)
        is_predicted = is_place & (match > 0)
        predicted = tl.load(found_tokens + row, mask=is_predicted, other=0)
        predicted = tl.where(match > 0, predicted, last)
        if HAS_BLOCK:
            match += AGREEMENT * tl.min(
                tl.where(is_predicted & (predicted == given), PADDED_K, draft), axis=0
            )
        trusted = tl.load(trust + tl.minimum(match + draft, MOST_TRUST))
        rates_of_text = rates + K * NUM_KNOTS
        chance_of_text = acceptance_of(
            rates_of_text, knots, draft, trusted, is_predicted, NUM_KNOTS
        )
    survival_of_text = tl.cumprod(chance_of_text, axis=0)
    bias_of_text = bias_of(record + 4, overall + 2, PRIOR)

    block_promises = tl.sum(tl.minimum(survival_of_block * bias_of_block, 1.0), axis=0)
    text_promises = tl.sum(tl.minimum(survival_of_text * bias_of_text, 1.0), axis=0)
    uses_text = text_promises > block_promises
    chance = tl.where(uses_text, chance_of_text, chance_of_block)
    survival = tl.where(uses_text, survival_of_text, survival_of_block)
    chosen_bias = tl.where(uses_text, bias_of_text, bias_of_block)
    corrected = tl.minimum(survival * chosen_bias, 1.0)
    # vLLM takes the product of chances as survival, so store the ratios of corrected survival.
    before = tl.minimum(survival / tl.where(chance > 0, chance, 1.0) * chosen_bias, 1.0)
    before = tl.where((draft == 0) | (corrected == 0.0), 1.0, before)
    tokens = tl.where(uses_text, predicted, given if HAS_BLOCK else last)
    chosen = tl.where(uses_text, TEXT, BLOCK if HAS_BLOCK else NO_DRAFTS)

    tl.debug_barrier()  # several threads read what one of them writes
    tl.store(drafts + row, tokens, mask=is_place & is_running)
    tl.store(chances + row, tl.minimum(corrected / before, 1.0), mask=is_place)
    tl.store(record, tl.where(is_running, chosen, NO_DRAFTS).to(tl.float32))
    tl.store(record + 1, match.to(tl.float32))
    of_drafts = record + HEAD + draft
    tl.store(of_drafts, sure, mask=is_place)
    tl.store(of_drafts + K, survival_of_block, mask=is_place)
    tl.store(of_drafts + 2 * K, survival_of_text, mask=is_place)
    tl.store(of_drafts + 3 * K, predicted.to(tl.float32), mask=is_place)


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
        slots.rates,
        slots.trust,
        slots.knots,
        HAS_BLOCK=has_block,
        HAS_TEXT=found is not None,
        HEAD=HEAD,
        K=width,
        PADDED_K=next_power_of_2(width),
        NUM_KNOTS=len(slots.knots),
        MOST_TRUST=len(slots.trust) - 1,
        AGREEMENT=AGREEMENT,
        PRIOR=BIAS_PRIOR_TOKENS,
        NO_DRAFTS=NO_DRAFTS,
        BLOCK=BLOCK,
        TEXT=TEXT,
        num_warps=1,
    )
