"""Attention of draft trees' rows to the context and the bonus token, which they all see.

Contexts are split into segments (flash-decoding), only as many as keep all programs busy. So in a
large batch, no context is split, even one that is much longer than the others.
"""

from __future__ import annotations

import torch
from vllm.triton_utils import tl, triton

from vllm_dflash.engine.v2.trees.tree_kernels import (
    VARYING,
    Launch,
    PagedRows,
    Parts,
    Scores,
    blocks_of,
    depth_of,
    last_tiles,
    part_rows,
    rows_of,
    seen_by,
    weigh,
)
from vllm_dflash.engine.v2.trees.tree_slots import TreeSlots

MOST_SEGMENTS = 16
"""Maximum number of segments of a context."""


@triton.jit(do_not_specialize=VARYING)
def _attend_context(  # type: ignore[no-untyped-def]
    query,  # [T, H, D]
    cache,  # [blocks, K/V heads, block size, 2 D]
    found_parts,  # [segments, rows, H, D]
    log_sums,  # [segments, rows, H]
    rows_per_request,
    segments,
    part_size,
    block_table,  # from here on: `Launch`
    query_start_loc,
    seq_lens,
    slots,
    masks,
    sizes,
    num_requests,
    most_rows,
    scale,
    softcap,
    stride_query,
    stride_query_head,
    stride_block,
    stride_kv_head,
    stride_slot,
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
    ends = last_tiles(
        query_start_loc, slots, sizes, num_requests, most_rows, GROUP, ROWS, PADDED_REQUESTS
    )
    dim = tl.arange(0, PADDED_HEAD)
    num_items = tl.max(ends, axis=0) * KV_HEADS * segments
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        segment = item % segments
        kv_head = item // segments % KV_HEADS
        tile = item // segments // KV_HEADS
        request, _, context, row, head, is_row, at, mask, q = rows_of(
            query,
            query_start_loc,
            seq_lens,
            ends,
            tile,
            kv_head,
            most_rows,
            stride_query,
            stride_query_head,
            GROUP,
            ROWS,
            HEAD_SIZE,
            PADDED_HEAD,
        )

        first = 0
        position = context + tl.zeros([ROWS], tl.int32)
        if WINDOW > 0:
            slot = tl.load(slots + request)
            seen = seen_by(masks, sizes, slot, row - 1, is_row & (row > 0), NODES)
            position = context + depth_of(seen)
            first = tl.maximum(context - WINDOW + 1, 0)
        share = tl.cdiv(tl.cdiv(context + 1 - first, segments), KEYS) * KEYS
        begin = first + segment * share
        end = tl.minimum(begin + share, context + 1)

        best = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        found = tl.zeros([ROWS, PADDED_HEAD], tl.float32)
        of_head = cache + kv_head * stride_kv_head
        # Look up blocks one tile ahead, so that keys can be loaded ahead of their use.
        key = begin + tl.arange(0, KEYS)
        block = blocks_of(block_table, request, stride_table, key, key < end, BLOCK_SIZE)
        for tile_start in range(begin, end, KEYS):
            key = tile_start + tl.arange(0, KEYS)
            is_key = key < end
            then = key + KEYS
            next_block = blocks_of(block_table, request, stride_table, then, then < end, BLOCK_SIZE)
            visible = is_row[:, None] & is_key[None, :]
            if WINDOW > 0:
                visible = visible & (position[:, None] - key[None, :] < WINDOW)
            best, total, found = weigh(
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
            block = next_block

        is_found = total > 0
        divisor = tl.where(is_found, total, 1.0)
        to = segment.to(tl.int64) * part_size + head
        to += part_rows(request, row, at, rows_per_request) * (KV_HEADS * GROUP)
        tl.store(
            found_parts + (to * HEAD_SIZE)[:, None] + dim[None, :],
            found * (1.0 / divisor)[:, None],
            mask=mask & is_found[:, None],
        )
        log_sum = tl.where(is_found, best + tl.log(divisor), float("-inf"))
        tl.store(log_sums + to, log_sum, mask=is_row)


def num_segments(num_tiles: int, num_programs: int) -> int:
    """Number of segments of each context: as many as keep all programs busy."""
    return max(1, min(MOST_SEGMENTS, num_programs // max(1, num_tiles)))


def attend_to_context(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    batch: PagedRows,
    trees: TreeSlots,
    scores: Scores,
    *,
    all_requests: bool,
    segments: int | None = None,
) -> Parts:
    """Attend to the context and the bonus token. May be captured.

    Args:
        query: [T, H, D].
        kv_cache: cache that holds all rows of the batch, [blocks, K/V heads, block size, 2 D].
        batch: R requests.
        trees: trees by slot.
        scores: score settings of the layer; sinks are left to `attend_to_nodes`.
        all_requests: True: rows of all requests, at most `MOST_ROWS` each; False: only of those
            with trees.
        segments: number of segments of each context; None: as many as keep the GPU busy.
    """
    launch = Launch.from_batch(query, kv_cache, batch, trees, scores, all_requests=all_requests)
    if segments is None:
        segments = num_segments(launch.num_tiles, launch.num_programs)
    shape = segments, launch.num_rows, *query.shape[1:]
    found = query.new_empty(shape, dtype=torch.float32)
    log_sums = query.new_empty(shape[:-1], dtype=torch.float32)
    _attend_context[(launch.num_programs,)](
        query,
        kv_cache,
        found,
        log_sums,
        launch.rows_per_request,
        segments,
        log_sums.stride(0),
        *launch.arguments,
        **launch.constants,
    )
    return Parts(found, log_sums, launch.rows_per_request)
