"""Splits a budget of drafts among a batch's requests on the device, by what drafts are worth."""

from __future__ import annotations

import torch
from vllm.triton_utils import tl, triton
from vllm.utils.math_utils import next_power_of_2

FEW = 32
"""Maximum number of requests for the small program."""


@triton.jit(do_not_specialize=["budget", "num_requests"])
def _split(  # type: ignore[no-untyped-def]
    chances,  # [S, K]
    slots,  # [R]
    rows,  # [2, R]: drafts of each request, and its other rows
    logit_ends,  # [S + 1]: out, 0 and where each request's logits end
    row_ends,  # [S + 1]: out, the same for rows; after the batch, the total
    budget,
    num_requests,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    BONUS: tl.constexpr,
    FAIR: tl.constexpr,
    SLOTS: tl.constexpr,
    PADDED_SLOTS: tl.constexpr,
    PADDED_REQUESTS: tl.constexpr,
):
    request, draft = tl.arange(0, PADDED_REQUESTS), tl.arange(0, PADDED_K)[None, :]
    is_request = request < num_requests
    slot = tl.load(slots + request, mask=is_request, other=0).to(tl.int64)
    drafts = tl.load(rows + request, mask=is_request, other=0)
    others = tl.load(rows + num_requests + request, mask=is_request, other=0)
    is_draft = draft < tl.minimum(drafts, K)[:, None]
    chance = tl.load(chances + slot[:, None] * K + draft, mask=is_draft, other=1.0)
    worth = tl.cumprod(chance, axis=1)
    if FAIR:  # in the order of `planning.objective.worth_of`, which is the log1p of this
        tokens = 1.0 + tl.cumsum(worth, axis=1)
        worth = worth / (tokens - worth)
    # Exactly `budget` drafts must be admitted, as the host counts on it: also drafts of chance 0.
    worth = tl.where(worth > 0.0, tl.minimum(worth, 1.0), 0.0)
    # Floats from 0 to 1 sort in the order of their bits.
    worth = tl.where(is_draft, worth.to(tl.int32, bitcast=True), -1)
    least = tl.full([], 0, tl.int32)  # worth of the last admitted draft, found bit by bit
    for each in range(30):
        higher = least | (1 << (29 - each))
        is_enough = tl.sum(tl.sum((worth >= higher).to(tl.int32), axis=1), axis=0) >= budget
        least = tl.where(is_enough, higher, least)
    admitted = tl.sum((worth > least).to(tl.int32), axis=1)
    # Drafts worth as much as the last admitted one: the first requests' go first.
    alike = tl.sum((worth == least).to(tl.int32), axis=1)
    left = budget - tl.sum(admitted, axis=0) - (tl.cumsum(alike, axis=0) - alike)
    admitted += tl.minimum(tl.maximum(left, 0), alike)

    num_logits = tl.cumsum(tl.where(is_request, admitted + BONUS, 0), axis=0)
    num_rows = tl.cumsum(admitted + others, axis=0)
    tl.store(logit_ends + 1 + request, num_logits, mask=is_request)
    tl.store(row_ends + 1 + request, num_rows, mask=is_request)
    place = tl.arange(0, PADDED_SLOTS)
    tl.store(logit_ends + place, 0, mask=place == 0)
    behind = tl.where(place == 0, 0, tl.max(num_rows, axis=0))
    is_behind = (place == 0) | (place > num_requests)
    tl.store(row_ends + place, behind, mask=is_behind & (place <= SLOTS))


def split(
    chances: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    budget: int,
    bonus: int,
    logit_ends: torch.Tensor,
    row_ends: torch.Tensor,
    *,
    fair: bool = False,
) -> None:
    """Admit as many drafts of R requests as the budget allows.

    Args:
        chances: chance of each slot's drafts, given those before them, [S, K].
        slots: slots of the requests, [R].
        rows: number of drafts and of other rows of each request, [2, R] int32.
        budget: drafts to admit, at most the number of drafts.
        bonus: logits of each request besides its drafts'.
        logit_ends: out: 0, then the end of each request's logits, [S + 1] int32.
        row_ends: out: the same for rows; after the batch, the total number, [S + 1] int32.
        fair: whether a draft is worth what it adds to its own request's speed.
    """
    num_slots, width = chances.shape
    count = len(slots)
    requests = FEW if count <= FEW else next_power_of_2(num_slots)
    padded_width = next_power_of_2(width)
    _split[(1,)](
        chances,
        slots,
        rows,
        logit_ends,
        row_ends,
        budget,
        count,
        K=width,
        PADDED_K=padded_width,
        BONUS=bonus,
        FAIR=fair,
        SLOTS=num_slots,
        PADDED_SLOTS=next_power_of_2(num_slots + 1),
        PADDED_REQUESTS=requests,
        num_warps=min(max(requests * padded_width // 512, 4), 32),
    )
