"""Attention of draft trees over the paged cache: a row sees the context, the bonus token and its
ancestors.

One Triton kernel for the rows of requests with trees. A request's rows stand in the cache one after
the other, the bonus token first; a word of 64 bits says for each row which nodes it sees. So trees
have 64 nodes at most. Rows of all query heads of a K/V head are one tile, so that K and V are read
once for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.triton_utils import tl, triton

TILES = (32, 16)
SHARED_MEMORY = 64 * 1024
"""Bytes that a program of any GPU has: 64 KB on 7.5, 99 on 8.6, 8.9 and 12.0, more elsewhere."""


def tile_of(head_size: int, dtype: torch.dtype) -> int:
    """Rows and keys of a tile: as many as find room with queries, keys, values and weights.

    Where even 16 do not (float32 heads above 256), they are still the fewest that a product takes;
    that is 98 KB for heads of 512, which all but 7.5 have.
    """
    width = padded(head_size)
    needed = {each: dtype.itemsize * each * (3 * width + each) for each in TILES}
    return next((each for each in TILES if needed[each] <= SHARED_MEMORY), TILES[-1])


def padded(head_size: int) -> int:
    """Numbers of a head in a tile: a power of two."""
    return max(16, 1 << (head_size - 1).bit_length())


@dataclass(frozen=True)
class TreeRows:
    """How the rows of a batch hang together; on the device, so that graphs can be captured."""

    ancestors: torch.Tensor
    """Nodes that each row sees, itself among them: bit i is the request's node i, [T] int64."""
    depths: torch.Tensor
    """Tokens between a request's bonus token and each row, [T] int32."""
    branches: torch.Tensor
    """Whether each request has a tree, [R] int32."""


@dataclass(frozen=True)
class Scores:
    """How a layer weighs what it sees."""

    scale: float
    window: int = 0
    """Tokens that a row sees, itself included; 0: all."""
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    """A score of each head that takes part in the softmax and stands for nothing, [H]."""


@triton.jit(do_not_specialize=["stride_table"])
def _attend(  # type: ignore[no-untyped-def]
    query,  # [T, H, D]
    keys,  # [blocks, block size, K/V heads, D]
    values,
    output,  # [T, H, D]
    block_table,  # [R, blocks of a request]
    query_start_loc,  # [R + 1]
    seq_lens,  # [R]
    ancestors,
    depths,
    branches,
    sinks,
    scale,
    softcap,
    stride_query,
    stride_query_head,
    stride_key_block,
    stride_key_slot,
    stride_key_head,
    stride_value_block,
    stride_value_slot,
    stride_value_head,
    stride_output,
    stride_output_head,
    stride_table,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    EVERYBODY: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    request = tl.program_id(0)
    kv_head = tl.program_id(1)
    if not EVERYBODY and tl.load(branches + request) == 0:
        return
    start = tl.load(query_start_loc + request)
    num_rows = tl.load(query_start_loc + request + 1) - start
    place = tl.program_id(2) * TILE + tl.arange(0, TILE)  # row and head of each query
    row = place // GROUP
    head = kv_head * GROUP + place % GROUP
    is_row = row < num_rows
    if tl.program_id(2) * TILE >= num_rows * GROUP:
        return
    seq_len = tl.load(seq_lens + request)
    context = seq_len - num_rows  # position of the bonus token
    dims = tl.arange(0, PADDED_HEAD)
    is_dim = dims < HEAD_SIZE

    at = (start + row).to(tl.int64)
    q = tl.load(
        query + at[:, None] * stride_query + head[:, None] * stride_query_head + dims[None, :],
        mask=is_row[:, None] & is_dim[None, :],
        other=0.0,
    )
    seen = tl.load(ancestors + at, mask=is_row, other=0)
    position = context + tl.load(depths + at, mask=is_row, other=0)

    if HAS_SINKS:
        best = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32)
        total = tl.full([TILE], 1.0, tl.float32)
    else:
        best = tl.full([TILE], float("-inf"), tl.float32)
        total = tl.zeros([TILE], tl.float32)
    found = tl.zeros([TILE, PADDED_HEAD], tl.float32)

    first = 0
    if WINDOW > 0:
        first = tl.maximum(context - WINDOW + 1, 0) // TILE * TILE
    for tile in range(first, seq_len, TILE):
        slot = tile + tl.arange(0, TILE)
        is_key = slot < seq_len
        block = tl.load(
            block_table + request * stride_table + slot // BLOCK_SIZE, mask=is_key, other=0
        ).to(tl.int64)
        within = slot % BLOCK_SIZE
        # What no row sees may stand in a block that is no longer the request's.
        is_seen = is_key
        if WINDOW > 0:
            is_seen = is_key & (slot > context - WINDOW)
        is_loaded = is_seen[:, None] & is_dim[None, :]
        k = tl.load(
            keys
            + block[:, None] * stride_key_block
            + within[:, None] * stride_key_slot
            + kv_head * stride_key_head
            + dims[None, :],
            mask=is_loaded,
            other=0.0,
        )
        v = tl.load(
            values
            + block[:, None] * stride_value_block
            + within[:, None] * stride_value_slot
            + kv_head * stride_value_head
            + dims[None, :],
            mask=is_loaded,
            other=0.0,
        )
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if HAS_SOFTCAP:  # tanh, by what does not overflow
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)

        node = slot - context - 1  # below 0: the context and the bonus token
        # Beyond the word's 64 bits lie masked lanes only; a shift so far is undefined.
        bit = tl.minimum(tl.maximum(node, 0), 63).to(tl.int64)
        bits = (seen[:, None] >> bit[None, :]) & 1
        visible = is_key[None, :] & ((node[None, :] < 0) | (bits != 0))
        if WINDOW > 0:
            is_node = (node >= 0) & is_key
            depth = tl.load(depths + start + 1 + tl.maximum(node, 0), mask=is_node, other=0)
            key_position = tl.where(node >= 0, context + depth, slot)
            visible = visible & (position[:, None] - key_position[None, :] < WINDOW)
        scores = tl.where(visible, scores, float("-inf"))

        higher = tl.maximum(best, tl.max(scores, axis=1))
        reference = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen so far
        weights = tl.exp(scores - reference[:, None])
        faded = tl.exp(best - reference)
        total = total * faded + tl.sum(weights, axis=1)
        found = found * faded[:, None]
        found += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        best = higher

    tl.store(
        output + at[:, None] * stride_output + head[:, None] * stride_output_head + dims[None, :],
        found / total[:, None],
        mask=is_row[:, None] & is_dim[None, :],
    )


def attend_to_ancestors(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    output: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    rows: TreeRows,
    scores: Scores,
    *,
    most_rows: int,
    everybody: bool = False,
) -> None:
    """Write the rows of requests with trees; leave the others' alone. May be captured.

    Args:
        query: [T, H, D].
        keys, values: of the paged cache, with all rows of the batch in it,
            [blocks, block size, K/V heads, D] each.
        output: [T, H, D].
        block_table: [R, blocks of a request].
        query_start_loc: [R + 1].
        seq_lens: tokens of each request, its rows included, [R].
        rows: how they hang together.
        scores: of the layer.
        most_rows: of a request with a tree.
        everybody: whether to write all requests' rows; those without a tree are chains.
    """
    num_kv_heads, head_size = keys.shape[2], keys.shape[3]
    group = query.shape[1] // num_kv_heads
    tile = tile_of(head_size, query.dtype)
    _attend[(len(seq_lens), num_kv_heads, triton.cdiv(most_rows * group, tile))](
        query,
        keys,
        values,
        output,
        block_table,
        query_start_loc,
        seq_lens,
        rows.ancestors,
        rows.depths,
        rows.branches,
        scores.sinks,
        scores.scale,
        scores.softcap,
        query.stride(0),
        query.stride(1),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        values.stride(0),
        values.stride(1),
        values.stride(2),
        output.stride(0),
        output.stride(1),
        block_table.stride(0),
        WINDOW=scores.window,
        HAS_SOFTCAP=scores.softcap > 0,
        HAS_SINKS=scores.sinks is not None,
        EVERYBODY=everybody,
        GROUP=group,
        HEAD_SIZE=head_size,
        PADDED_HEAD=padded(head_size),
        BLOCK_SIZE=keys.shape[1],
        TILE=tile,
    )
