"""Attention of draft trees over the paged cache, in two parts: what all rows of a request see, and
what only descendants do.

A request has a row for its bonus token and one for each of its nodes. Their keys and values stand
in the cache one behind the other. All rows see the context and the bonus token, without a mask:
`attend_to_context`, which splits long contexts into segments (flash-decoding), or any other kernel
that gives the logarithm of the sum of its weights with its output. A node also sees its ancestors
and itself: `attend_to_nodes`, for at most 64 nodes, which goes on from what was found for the
context, so merging takes no launch of its own.

Rows of all query heads of a K/V head are one tile: K and V are read once for them. How many rows
each request has is known to the device only (vLLM's graphs have places for as many requests as
rows), so a fixed number of programs shares the tiles that there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from vllm.triton_utils import tl, triton

MOST_SEGMENTS = 16
"""Of a context."""
PROGRAMS_PER_PROCESSOR = 2
FEW_REQUESTS = 64


class TreeRows(Protocol):
    """Trees of S requests with up to N nodes each, by slot."""

    slots: torch.Tensor
    """Of the batch's requests, [max R]; those behind the batch's are not looked at."""
    masks: torch.Tensor
    """Nodes that each node sees, itself among them: bit j is node j, [S, N] int64."""
    sizes: torch.Tensor
    """Nodes of each tree; 0: there is none, and rows see all rows before them, [S] int32."""


class RowsOfBatch(Protocol):
    """What vLLM says of a batch of R requests, on the device."""

    query_start_loc: torch.Tensor
    """[R + 1] int32."""
    seq_lens: torch.Tensor
    """Tokens of each request, its rows included, [R] int32."""


class PagedRows(RowsOfBatch, Protocol):
    """With the metadata of an attention layer."""

    block_table: torch.Tensor
    """[R, blocks of a request] int32."""


@dataclass(frozen=True)
class Scores:
    """How a layer weighs what it sees."""

    scale: float
    window: int = 0
    """Tokens that a row sees, itself included; 0: all."""
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    """A score of each head that takes part in the softmax and stands for nothing, [H]."""


class Parts(NamedTuple):
    """What rows found in each of P parts of what they see."""

    found: torch.Tensor
    """[P, T, H, D]; not looked at where there was nothing to see."""
    log_sums: torch.Tensor
    """Logarithms of the sums of weights, -inf where there was nothing to see, [P, T, H]."""


@triton.jit
def _last_tiles(  # type: ignore[no-untyped-def]
    query_start_loc,
    slots,
    sizes,
    num_requests,
    everybody,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED_REQUESTS: tl.constexpr,
):
    """Tiles of all requests up to each one, its own included, [PADDED_REQUESTS]."""
    request = tl.arange(0, PADDED_REQUESTS)
    is_request = request < num_requests
    end = tl.load(query_start_loc + 1 + request, mask=is_request, other=0)
    rows = end - tl.load(query_start_loc + request, mask=is_request, other=0)
    slot = tl.load(slots + request, mask=is_request & (rows > 0), other=0)
    size = tl.load(sizes + slot, mask=is_request & (rows > 0), other=0)
    rows = tl.where((size > 0) | (everybody != 0), rows, 0)
    return tl.cumsum((rows * GROUP + ROWS - 1) // ROWS, axis=0)


@triton.jit
def _seen_by(masks, sizes, slot, node, is_node, NODES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bits of the nodes that each node sees; none where `is_node` is false, as of bonus tokens."""
    # A shift by more than the word has is undefined, also where it is not looked at.
    bit = tl.minimum(tl.maximum(node, 0), 63).to(tl.int64)
    chain = (tl.full([1], 2, tl.int64) << bit) - 1
    is_tree = tl.load(sizes + slot) > 0
    is_written = is_node & is_tree & (node < NODES)
    seen = tl.load(masks + slot.to(tl.int64) * NODES + bit, mask=is_written, other=0)
    return tl.where(is_tree, seen, tl.where(is_node, chain, 0))


@triton.jit
def _depth_of(seen):  # type: ignore[no-untyped-def]
    """Tokens between the bonus token and each node: as many as it sees."""
    bit = tl.arange(0, 64).to(tl.int64)
    return tl.sum(((seen[:, None] >> bit[None, :]) & 1).to(tl.int32), axis=1)


@triton.jit
def _weigh(  # type: ignore[no-untyped-def]
    q,  # [ROWS, D]
    cache,  # of the K/V head
    at,  # of each key's slot in it
    is_loaded,  # [KEYS]
    visible,  # [ROWS, KEYS]
    best,  # [ROWS]
    total,  # [ROWS]
    found,  # [ROWS, D]
    scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD: tl.constexpr,
):
    """A tile of keys more: the highest score, the sum of weights, and values as weighed."""
    dim = tl.arange(0, PADDED_HEAD)
    mask = is_loaded[:, None] & (dim < HEAD_SIZE)[None, :]
    key = cache + at[:, None] + dim[None, :]
    k = tl.load(key, mask=mask, other=0.0).to(q.dtype)
    v = tl.load(key + HEAD_SIZE, mask=mask, other=0.0).to(q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if HAS_SOFTCAP:  # tanh, by what does not overflow
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
    scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(best, tl.max(scores, axis=1))
    reference = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen so far
    weights = tl.exp(scores - reference[:, None])
    faded = tl.exp(best - reference)
    total = total * faded + tl.sum(weights, axis=1)
    found = found * faded[:, None]
    found += tl.dot(weights.to(q.dtype), v, input_precision="ieee")
    return higher, total, found


VARYING = ["num_requests", "everybody", "segments", "num_parts", "stride_table"]
VARYING += ["stride_part", "stride_part_row", "stride_part_head"]
VARYING += ["stride_sums", "stride_sums_row", "stride_sums_head"]
"""Differ from batch to batch, so that nothing may be compiled for them."""


@triton.jit(do_not_specialize=VARYING)
def _attend_context(  # type: ignore[no-untyped-def]
    query,  # [T, H, D]
    cache,  # [blocks, K/V heads, block size, 2 D]
    found_parts,  # [segments, T, H, D]
    log_sums,  # [segments, T, H]
    block_table,
    query_start_loc,
    seq_lens,
    slots,
    masks,
    sizes,
    num_requests,
    everybody,
    segments,
    scale,
    softcap,
    stride_query,
    stride_query_head,
    stride_block,
    stride_kv_head,
    stride_slot,
    stride_part,
    stride_part_row,
    stride_part_head,
    stride_sums,
    stride_sums_row,
    stride_sums_head,
    stride_table,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    NODES: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PADDED_REQUESTS: tl.constexpr,
):
    ends = _last_tiles(
        query_start_loc, slots, sizes, num_requests, everybody, GROUP, ROWS, PADDED_REQUESTS
    )
    dim = tl.arange(0, PADDED_HEAD)
    num_items = tl.max(ends, axis=0) * KV_HEADS * segments
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        segment = item % segments
        kv_head = item // segments % KV_HEADS
        tile = item // segments // KV_HEADS
        request = tl.sum((ends <= tile).to(tl.int32), axis=0)
        first_tile = tl.max(tl.where(ends <= tile, ends, 0), axis=0)

        start = tl.load(query_start_loc + request)
        num_rows = tl.load(query_start_loc + request + 1) - start
        context = tl.load(seq_lens + request) - num_rows  # position of the bonus token
        place = (tile - first_tile) * ROWS + tl.arange(0, ROWS)  # row and head of each query
        row = place // GROUP
        head = kv_head * GROUP + place % GROUP
        is_row = row < num_rows
        at = (start + row).to(tl.int64)
        mask = is_row[:, None] & (dim < HEAD_SIZE)[None, :]
        asked = query + at[:, None] * stride_query + head[:, None] * stride_query_head
        q = tl.load(asked + dim[None, :], mask=mask, other=0.0)

        first = 0
        position = context + tl.zeros([ROWS], tl.int32)
        if WINDOW > 0:
            slot = tl.load(slots + request)
            seen = _seen_by(masks, sizes, slot, row - 1, is_row & (row > 0), NODES)
            position = context + _depth_of(seen)
            first = tl.maximum(context - WINDOW + 1, 0)
        share = tl.cdiv(tl.cdiv(context + 1 - first, segments), KEYS) * KEYS
        begin = first + segment * share
        end = tl.minimum(begin + share, context + 1)

        best = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        found = tl.zeros([ROWS, PADDED_HEAD], tl.float32)
        of_head = cache + kv_head * stride_kv_head
        for tile_start in range(begin, end, KEYS):
            key = tile_start + tl.arange(0, KEYS)
            is_key = key < end
            block = tl.load(
                block_table + request.to(tl.int64) * stride_table + key // BLOCK_SIZE,
                mask=is_key,
                other=0,
            ).to(tl.int64)
            visible = is_row[:, None] & is_key[None, :]
            if WINDOW > 0:
                visible = visible & (position[:, None] - key[None, :] < WINDOW)
            best, total, found = _weigh(
                q,
                of_head,
                block * stride_block + key % BLOCK_SIZE * stride_slot,
                is_key,
                visible,
                best,
                total,
                found,
                scale,
                softcap,
                HAS_SOFTCAP,
                HEAD_SIZE,
                PADDED_HEAD,
            )

        is_found = total > 0
        divisor = tl.where(is_found, total, 1.0)
        to = segment.to(tl.int64) * stride_part + at * stride_part_row + head * stride_part_head
        tl.store(
            found_parts + to[:, None] + dim[None, :],
            found / divisor[:, None],
            mask=mask & is_found[:, None],
        )
        to = segment.to(tl.int64) * stride_sums + at * stride_sums_row + head * stride_sums_head
        log_sum = tl.where(is_found, best + tl.log(divisor), float("-inf"))
        tl.store(log_sums + to, log_sum, mask=is_row)


@triton.jit(do_not_specialize=VARYING)
def _attend_nodes(  # type: ignore[no-untyped-def]
    query,  # [T, H, D]
    cache,  # [blocks, K/V heads, block size, 2 D]
    found_parts,  # [P, T, H, D]
    log_sums,  # [P, T, H]
    output,  # [T, H, D]
    block_table,
    query_start_loc,
    seq_lens,
    slots,
    masks,
    sizes,
    sinks,
    num_requests,
    everybody,
    num_parts,
    scale,
    softcap,
    stride_query,
    stride_query_head,
    stride_block,
    stride_kv_head,
    stride_slot,
    stride_part,
    stride_part_row,
    stride_part_head,
    stride_sums,
    stride_sums_row,
    stride_sums_head,
    stride_table,
    stride_output,
    stride_output_head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    NODES: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PADDED_REQUESTS: tl.constexpr,
):
    ends = _last_tiles(
        query_start_loc, slots, sizes, num_requests, everybody, GROUP, ROWS, PADDED_REQUESTS
    )
    dim = tl.arange(0, PADDED_HEAD)
    num_items = tl.max(ends, axis=0) * KV_HEADS
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        kv_head = item % KV_HEADS
        tile = item // KV_HEADS
        request = tl.sum((ends <= tile).to(tl.int32), axis=0)
        first_tile = tl.max(tl.where(ends <= tile, ends, 0), axis=0)

        start = tl.load(query_start_loc + request)
        num_rows = tl.load(query_start_loc + request + 1) - start
        context = tl.load(seq_lens + request) - num_rows  # position of the bonus token
        slot = tl.load(slots + request)
        place = (tile - first_tile) * ROWS + tl.arange(0, ROWS)  # row and head of each query
        row = place // GROUP
        head = kv_head * GROUP + place % GROUP
        is_row = row < num_rows
        at = (start + row).to(tl.int64)
        mask = is_row[:, None] & (dim < HEAD_SIZE)[None, :]
        asked = query + at[:, None] * stride_query + head[:, None] * stride_query_head
        q = tl.load(asked + dim[None, :], mask=mask, other=0.0)
        seen = _seen_by(masks, sizes, slot, row - 1, is_row & (row > 0), NODES)

        if HAS_SINKS:
            best = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32)
            total = tl.full([ROWS], 1.0, tl.float32)
        else:
            best = tl.full([ROWS], float("-inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
        found = tl.zeros([ROWS, PADDED_HEAD], tl.float32)
        for part in range(num_parts):
            of_sums = log_sums + part * stride_sums + at * stride_sums_row
            log_sum = tl.load(of_sums + head * stride_sums_head, mask=is_row, other=float("-inf"))
            # FlashAttention 2 says +inf where there was nothing to see.
            is_found = is_row & (tl.abs(log_sum) < float("inf"))
            of_part = found_parts + part * stride_part + at * stride_part_row
            in_part = tl.load(
                (of_part + head * stride_part_head)[:, None] + dim[None, :],
                mask=mask & is_found[:, None],
                other=0.0,
            ).to(tl.float32)
            log_sum = tl.where(is_found, log_sum, float("-inf"))
            higher = tl.maximum(best, log_sum)
            reference = tl.where(higher == float("-inf"), 0.0, higher)
            faded, weight = tl.exp(best - reference), tl.exp(log_sum - reference)
            total = total * faded + weight
            found = found * faded[:, None] + in_part * weight[:, None]
            best = higher

        num_nodes = num_rows - 1
        of_head = cache + kv_head * stride_kv_head
        for first in range(0, num_nodes, KEYS):
            node = first + tl.arange(0, KEYS)
            is_key = node < num_nodes
            key = context + 1 + node
            block = tl.load(
                block_table + request.to(tl.int64) * stride_table + key // BLOCK_SIZE,
                mask=is_key,
                other=0,
            ).to(tl.int64)
            bit = tl.minimum(node, 63).to(tl.int64)
            visible = is_key[None, :] & (((seen[:, None] >> bit[None, :]) & 1) != 0)
            if WINDOW > 0:
                depth = _depth_of(_seen_by(masks, sizes, slot, node, is_key, NODES))
                visible = visible & (_depth_of(seen)[:, None] - depth[None, :] < WINDOW)
            best, total, found = _weigh(
                q,
                of_head,
                block * stride_block + key % BLOCK_SIZE * stride_slot,
                is_key,
                visible,
                best,
                total,
                found,
                scale,
                softcap,
                HAS_SOFTCAP,
                HEAD_SIZE,
                PADDED_HEAD,
            )

        to = output + at[:, None] * stride_output + head[:, None] * stride_output_head
        divisor = tl.where(total > 0, total, 1.0)  # of lanes that are no rows
        tl.store(to + dim[None, :], found / divisor[:, None], mask=mask)


def tile_of(head_size: int, itemsize: int) -> tuple[int, int]:
    """Rows and keys of a tile, with room for queries, keys and values in 99 KiB, which is what
    GPUs of capability 8.6, 8.9 and 12.0 have; others have more."""
    width = _padded(head_size) * itemsize
    return next(tile for most, tile in TILES if width <= most)


TILES = ((256, (64, 64)), (512, (32, 32)), (1024, (16, 32)), (2048, (16, 16)))
"""By bytes of a head."""


def _padded(head_size: int) -> int:
    """Numbers of a head in a tile: a power of two."""
    return max(16, triton.next_power_of_2(head_size))


def _num_programs(device: torch.device) -> int:
    """That run at a time; in the interpreter, one after the other."""
    if device.type != "cuda":
        return 2
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return PROGRAMS_PER_PROCESSOR * processors


def num_segments(num_tiles: int, num_programs: int) -> int:
    """Of each context: as many as give all programs something to do."""
    return max(1, min(MOST_SEGMENTS, num_programs // max(1, num_tiles)))


@dataclass(frozen=True)
class _Launch:
    """What both kernels are given."""

    batch: tuple[torch.Tensor, ...]
    cache_strides: tuple[int, ...]
    num_tiles: int
    """That a batch of so many rows has at least, of all K/V heads."""
    num_programs: int
    constants: dict[str, int | bool]

    @classmethod
    def of(
        cls,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: PagedRows,
        trees: TreeRows,
        scores: Scores,
    ) -> _Launch:
        kv_heads, block_size = kv_cache.shape[1:3]
        heads, head_size = query.shape[1:]
        group, nodes = heads // kv_heads, trees.masks.shape[1]
        rows, keys = tile_of(head_size, query.element_size())
        rows = min(rows, max(16, triton.next_power_of_2((1 + nodes) * group)))
        num_programs = _num_programs(query.device)
        # One kernel for batches that gain by trees, and one for all others.
        requests = FEW_REQUESTS if len(batch.seq_lens) <= FEW_REQUESTS else len(trees.slots)
        tensors = batch.block_table, batch.query_start_loc, batch.seq_lens
        return cls(
            (*tensors, trees.slots, trees.masks, trees.sizes),
            kv_cache.stride()[:3],
            triton.cdiv(len(query) * group, rows) * kv_heads,
            num_programs,
            {
                "KV_HEADS": kv_heads,
                "GROUP": group,
                "NODES": nodes,
                "WINDOW": scores.window,
                "HAS_SOFTCAP": scores.softcap > 0,
                "HEAD_SIZE": head_size,
                "PADDED_HEAD": _padded(head_size),
                "BLOCK_SIZE": block_size,
                "ROWS": rows,
                "KEYS": keys,
                "PADDED_REQUESTS": triton.next_power_of_2(requests),
            },
        )


def attend_to_context(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    batch: PagedRows,
    trees: TreeRows,
    scores: Scores,
    *,
    everybody: bool,
    segments: int | None = None,
) -> Parts:
    """What rows find in the context and the bonus token. May be captured.

    Contexts are split into as many segments as the batch's rows leave programs idle; so of many
    requests, a much longer one than the others is not.

    Args:
        query: [T, H, D].
        kv_cache: with all rows of the batch in it, [blocks, K/V heads, block size, 2 D].
        batch: of R requests.
        trees: of their slots.
        scores: of the layer; sinks are left to `attend_to_nodes`.
        everybody: all requests' rows, at most 1 + N of each; else of those with trees.
        segments: of each context; None: as many as keep the GPU busy.
    """
    launch = _Launch.of(query, kv_cache, batch, trees, scores)
    if segments is None:
        segments = num_segments(launch.num_tiles, launch.num_programs)
    found = query.new_empty((segments, *query.shape), dtype=torch.float32)
    log_sums = query.new_empty((segments, *query.shape[:2]), dtype=torch.float32)
    _attend_context[(launch.num_programs,)](
        query,
        kv_cache,
        found,
        log_sums,
        *launch.batch,
        len(batch.seq_lens),
        int(everybody),
        segments,
        scores.scale,
        scores.softcap,
        *query.stride()[:2],
        *launch.cache_strides,
        *found.stride()[:3],
        *log_sums.stride(),
        batch.block_table.stride(0),
        **launch.constants,
        num_stages=2,
    )
    return Parts(found, log_sums)


def attend_to_nodes(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    context: Parts,
    output: torch.Tensor,
    batch: PagedRows,
    trees: TreeRows,
    scores: Scores,
    *,
    everybody: bool,
) -> None:
    """Write rows [T, H, D] as they are with all that they see; leave others' alone. May be
    captured. `context` is what they found so far; for the others see `attend_to_context`."""
    launch = _Launch.of(query, kv_cache, batch, trees, scores)
    _attend_nodes[(min(launch.num_programs, len(query) * kv_cache.shape[1]),)](
        query,
        kv_cache,
        *context,
        output,
        *launch.batch,
        scores.sinks,
        len(batch.seq_lens),
        int(everybody),
        len(context.found),
        scores.scale,
        scores.softcap,
        *query.stride()[:2],
        *launch.cache_strides,
        *context.found.stride()[:3],
        *context.log_sums.stride(),
        batch.block_table.stride(0),
        *output.stride()[:2],
        **launch.constants,
        HAS_SINKS=scores.sinks is not None,
        num_stages=1,
    )
