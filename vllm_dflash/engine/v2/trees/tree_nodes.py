"""Attention of draft trees' nodes to their ancestors and themselves, after the context.

Continues from the context's results, as one more tile of keys would, so merging needs no separate
launch. Sinks are applied here.
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


@triton.jit(do_not_specialize=VARYING)
def _attend_nodes(  # type: ignore[no-untyped-def]
    query,  # [T, H, D]
    cache,  # [blocks, K/V heads, block size, 2 D]
    found_parts,  # [P, T, H, D]
    log_sums,  # [P, T, H]
    output,  # [T, H, D]
    sinks,  # [H] or None
    rows_per_request,
    num_parts,
    part_size,
    stride_output,
    stride_output_head,
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
    HAS_SINKS: tl.constexpr,
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
    num_items = tl.max(ends, axis=0) * KV_HEADS
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        kv_head = item % KV_HEADS
        tile = item // KV_HEADS
        request, num_rows, context, row, head, is_row, at, mask, q = rows_of(
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
        num_nodes, end = num_rows - 1, context + num_rows
        # Look up blocks one tile ahead, so that keys can be loaded ahead of their use.
        key = context + 1 + tl.arange(0, KEYS)
        block = blocks_of(block_table, request, stride_table, key, key < end, BLOCK_SIZE)
        slot = tl.load(slots + request)
        seen = seen_by(masks, sizes, slot, row - 1, is_row & (row > 0), NODES)

        if HAS_SINKS:
            best = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32)
            total = tl.full([ROWS], 1.0, tl.float32)
        else:
            best = tl.full([ROWS], float("-inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
        found = tl.zeros([ROWS, PADDED_HEAD], tl.float32)
        part_row = part_rows(request, row, at, rows_per_request)
        in_parts = part_row * (KV_HEADS * GROUP) + head
        for part in tl.range(num_parts, num_stages=3):
            at_part = in_parts + part * part_size
            log_sum = tl.load(log_sums + at_part, mask=is_row, other=float("-inf"))
            in_part = tl.load(
                found_parts + (at_part * HEAD_SIZE)[:, None] + dim[None, :],
                mask=mask & (log_sum > float("-inf"))[:, None],
                other=0.0,
            )
            higher = tl.maximum(best, log_sum)
            reference = tl.where(higher == float("-inf"), 0.0, higher)
            faded, weight = tl.exp(best - reference), tl.exp(log_sum - reference)
            total = total * faded + weight
            found = found * faded[:, None] + in_part * weight[:, None]
            best = higher

        of_head = cache + kv_head * stride_kv_head
        for first in range(0, num_nodes, KEYS):
            node = first + tl.arange(0, KEYS)
            is_key = node < num_nodes
            key = context + 1 + node
            then = key + KEYS
            next_block = blocks_of(block_table, request, stride_table, then, then < end, BLOCK_SIZE)
            bit = tl.minimum(node, 63).to(tl.int64)
            visible = is_key[None, :] & (((seen[:, None] >> bit[None, :]) & 1) != 0)
            if WINDOW > 0:
                depth = depth_of(seen_by(masks, sizes, slot, node, is_key, NODES))
                visible = visible & (depth_of(seen)[:, None] - depth[None, :] < WINDOW)
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

        to = output + at[:, None] * stride_output + head[:, None] * stride_output_head
        divisor = tl.where(total > 0, total, 1.0)  # total is 0 in lanes that are not rows
        tl.store(to + dim[None, :], found * (1.0 / divisor)[:, None], mask=mask)


def attend_to_nodes(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    context: Parts,
    output: torch.Tensor,
    batch: PagedRows,
    trees: TreeSlots,
    scores: Scores,
    *,
    all_requests: bool,
) -> None:
    """Write the attention output of rows [T, H, D] over all that they see; rows that are left out
    are not written. May be captured.

    `context`: their results so far. For the other arguments see `attend_to_context`.
    """
    launch = Launch.from_batch(query, kv_cache, batch, trees, scores, all_requests=all_requests)
    _attend_nodes[(min(launch.num_programs, len(query) * kv_cache.shape[1]),)](
        query,
        kv_cache,
        context.found,
        context.log_sums,
        output,
        scores.sinks,
        context.rows_per_request,
        len(context.found),
        context.log_sums.stride(0),
        *output.stride()[:2],
        *launch.arguments,
        **launch.constants,
        HAS_SINKS=scores.sinks is not None,
    )
