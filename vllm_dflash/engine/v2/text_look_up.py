"""Looks up on the device what the requests' own texts predict; on V1: `planning.texts`.

There is no index: each step reads all of each text once, 4 bytes per token. 1% of a 6 ms step is
60 us, in which a GPU reads 180 MB of its own memory at 3 TB/s: 45 million tokens of running texts,
which is 256 requests of 176,000 tokens each. Only with more would an index be worth its memory.
Over PCIe, at 50 GB/s, it would be 3 MB: 750,000 tokens, or 256 requests of 2,900. So texts must be
in device memory: 134 MB for 256 requests of up to 131,072 tokens.
"""

from __future__ import annotations

import torch
from vllm.triton_utils import tl, triton
from vllm.utils.math_utils import next_power_of_2
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
from vllm.v1.worker.gpu.states import RequestState

from vllm_dflash.engine.reporting.log import logger
from vllm_dflash.engine.v2.draft_slots import Batch
from vllm_dflash.planning.texts import LONGEST, SHORTEST

TILE = 1024
"""Positions in a text that are compared at a time."""
MOST_PROGRAMS = 4096
"""Maximum number of programs that scan a batch's texts; more than a GPU runs at once."""
MOST_TEXT_BYTES = 2 << 30


@triton.jit(do_not_specialize=["stride_texts", "stride_best"])
def _scan(  # type: ignore[no-untyped-def]
    texts,  # [S, L]
    text_lens,  # [S]
    slots,  # [R]
    num_sampled,  # [R]
    best,  # [max R, parts of a text]
    stride_texts,
    stride_best,
    SHORTEST: tl.constexpr,
    LONGEST: tl.constexpr,
    TILE: tl.constexpr,
):
    request, part = tl.program_id(0), tl.program_id(1)
    if tl.load(num_sampled + request) == 0:
        return
    slot = tl.load(slots + request).to(tl.int64)
    text = texts + slot * stride_texts
    last = tl.load(text_lens + slot) - 1
    found = tl.zeros([TILE], tl.int64)
    for first in range(part * TILE, last, tl.num_programs(1) * TILE):
        position = first + tl.arange(0, TILE)
        still = position < last
        match = tl.zeros([TILE], tl.int64)
        size = 0
        while (size < LONGEST) & (tl.max(still.to(tl.int32), axis=0) > 0):
            # A match ends where the text begins: -1 is no token.
            token = tl.load(text + position - size, mask=still & (position >= size), other=-1)
            still = token == tl.load(text + last - size)
            match += still.to(tl.int64)
            size += 1
        # The longest match wins; of equally long ones, the last.
        found = tl.maximum(found, tl.where(match >= SHORTEST, (match << 32) | (position + 1), 0))
    tl.store(best + request * stride_best + part, tl.max(found, axis=0))


@triton.jit(do_not_specialize=["stride_texts", "stride_best", "num_parts"])
def _predict(  # type: ignore[no-untyped-def]
    texts,  # [S, L]
    text_lens,  # [S]
    slots,  # [R]
    num_sampled,  # [R]
    best,  # [max R, parts of a text]
    tokens,  # [max R, K]
    matches,  # [max R]
    stride_texts,
    stride_best,
    num_parts,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
):
    request = tl.program_id(0)
    part, draft = tl.arange(0, PADDED_PARTS), tl.arange(0, PADDED_K)
    slot = tl.load(slots + request).to(tl.int64)
    if slot < 0:  # a graph's row past the batch
        return
    end = tl.load(text_lens + slot)
    is_running = tl.load(num_sampled + request) > 0
    is_part = is_running & (part < num_parts)
    found = tl.max(tl.load(best + request * stride_best + part, mask=is_part, other=0), axis=0)
    match, start = found >> 32, found & 0xFFFFFFFF
    # Past the end of the text, repeat from the start of the prediction; without a match, repeat
    # the last token.
    position = tl.where(match > 0, start + draft % tl.maximum(end - start, 1), end - 1)
    is_draft = draft < K
    token = tl.load(texts + slot * stride_texts + position, mask=is_running & is_draft, other=0)
    tl.store(tokens + request * K + draft, token.to(tl.int64), mask=is_draft)
    tl.store(matches + request, match.to(tl.int32))


class TextLookUp:
    """Finds where a text's last tokens occurred before, and what followed them there."""

    def __init__(self, max_requests: int, max_len: int, width: int, device: torch.device) -> None:
        """Allocate for `max_requests` in a batch, texts of `max_len` tokens, and K drafts each."""
        # Results of the last look-up, in the batch's order: K predicted tokens, and the length of
        # the match. If that is 0, the tokens repeat the text's last one, since models read them.
        self.tokens = torch.zeros(max_requests, width, dtype=torch.int64, device=device)
        self.matches = torch.zeros(max_requests, dtype=torch.int32, device=device)
        most_parts = min(triton.cdiv(max_len, TILE), MOST_PROGRAMS)
        self._best = torch.zeros(max_requests, most_parts, dtype=torch.int64, device=device)

    def look_up(self, batch: Batch) -> None:
        """Write `tokens` and `matches` of R requests; other rows are not written. Captured."""
        num_requests = len(batch.slots)
        most_parts, width = self._best.shape[1], self.tokens.shape[1]
        num_parts = min(most_parts, MOST_PROGRAMS // max(1, num_requests) or 1)
        asked = batch.texts, batch.text_lens, batch.slots, batch.num_sampled, self._best
        strides = batch.texts.stride(0), self._best.stride(0)
        _scan[(num_requests, num_parts)](
            *asked, *strides, SHORTEST=SHORTEST, LONGEST=LONGEST, TILE=TILE
        )
        _predict[(num_requests,)](
            *asked,
            self.tokens,
            self.matches,
            *strides,
            num_parts,
            K=width,
            PADDED_K=next_power_of_2(width),
            PADDED_PARTS=next_power_of_2(most_parts),
            num_warps=1,
        )


def has_room_for_texts(num_requests: int, most_tokens: int) -> bool:
    """Whether the device has room for the texts of `num_requests`; logs a warning if not."""
    size = num_requests * most_tokens * torch.int32.itemsize
    if size > MOST_TEXT_BYTES:
        logger().warning(
            "no free drafts: the texts of %d requests of up to %d tokens would take %.1f GiB of the"
            " device's memory. Set --max-num-seqs or --max-model-len lower to get them.",
            num_requests,
            most_tokens,
            size / 2**30,
        )
    return size <= MOST_TEXT_BYTES


def keep_texts_on_device(states: RequestState) -> None:
    """Move request texts to device memory (hook "request texts"): look-ups read all of one.

    vLLM keeps them in host memory. Call this before the runner passes the tensor on.
    """
    texts = states.all_token_ids
    shape = states.max_num_reqs, states.max_model_len
    states.all_token_ids = StagedWriteTensor(shape, dtype=texts.dtype, device=states.device)
