"""Shared parts of the kernels that attend to draft trees: their inputs, tiles and softmax.

A request has a row for its bonus token and one for each of its nodes. Their keys and values are
consecutive in the cache. All rows see the context and the bonus token, without a mask
(`tree_context.py`). A node also sees its ancestors and itself (`tree_nodes.py`), at most 64 nodes.

A tile has rows of all query heads of a K/V head, so K and V are read once for them. Only the device
knows how many rows each request has (vLLM's graphs allow as many requests as rows), so a fixed
number of programs shares the tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from vllm.triton_utils import tl, triton
from vllm.utils.math_utils import next_power_of_2

from vllm_dflash.config.speculative_settings import MOST_NODES
from vllm_dflash.engine.v2.trees.tree_slots import TreeSlots

MOST_ROWS = 1 + MOST_NODES
"""Maximum rows of a request: the bits of one word say which nodes a node sees."""
FEW_REQUESTS = 64


class PagedRows(Protocol):
    """Layout of a batch of R requests in vLLM's attention metadata, on the device."""

    query_start_loc: torch.Tensor
    """First row of each request, and the total, [R + 1] int32."""
    seq_lens: torch.Tensor
    """Length of each request in tokens, its rows included, [R] int32."""
    block_table: torch.Tensor
    """[R, blocks of a request] int32."""


@dataclass(frozen=True)
class Scores:
    """How a layer computes attention scores."""

    scale: float
    window: int = 0
    """Tokens that a row sees, itself included; 0: all."""
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    """Score per head that joins the softmax and has no value, [H]."""


class Parts(NamedTuple):
    """Attention results of rows for each of P parts of the keys that they see."""

    found: torch.Tensor
    """Outputs, [P, T, H, D] float32; not written if no key was visible."""
    log_sums: torch.Tensor
    """Logarithms of the sums of weights; -inf if no key was visible, [P, T, H] float32."""
    rows_per_request: int = 0
    """Rows for each request, so that T is R * rows_per_request; 0: rows are those of the batch."""


@triton.jit
def last_tiles(  # type: ignore[no-untyped-def]
    query_start_loc,
    slots,
    sizes,
    num_requests,
    most_rows,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED_REQUESTS: tl.constexpr,
):
    """Number of tiles up to and including each request's, [PADDED_REQUESTS]."""
    request = tl.arange(0, PADDED_REQUESTS)
    is_request = request < num_requests
    end = tl.load(query_start_loc + 1 + request, mask=is_request, other=0)
    rows = end - tl.load(query_start_loc + request, mask=is_request, other=0)
    slot = tl.load(slots + request, mask=is_request & (rows > 0), other=0)
    size = tl.load(sizes + slot, mask=is_request & (rows > 0), other=0)
    rows = tl.where(most_rows == 0, rows, tl.where(size > 0, tl.minimum(rows, most_rows), 0))
    return tl.cumsum((rows * GROUP + ROWS - 1) // ROWS, axis=0)


@triton.jit
def rows_of(  # type: ignore[no-untyped-def]
    query,  # [T, H, D]
    query_start_loc,
    seq_lens,
    ends,  # from `last_tiles`
    tile,
    kv_head,
    most_rows,
    stride_query,
    stride_query_head,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD: tl.constexpr,
):
    """Find the rows of a tile.

    Returns the request, its number of rows, and its bonus token's position; then, [ROWS] each, row
    of the request, query head, whether the row exists, and row of the batch; then the mask of the
    queries, and the queries, [ROWS, D] each.
    """
    request = tl.sum((ends <= tile).to(tl.int32), axis=0)
    first_tile = tl.max(tl.where(ends <= tile, ends, 0), axis=0)
    start = tl.load(query_start_loc + request)
    num_rows = tl.load(query_start_loc + request + 1) - start
    # During capture, vLLM's Triton backend sets every request's length to 1, whatever its rows.
    context = tl.maximum(tl.load(seq_lens + request) - num_rows, 0)
    place = (tile - first_tile) * ROWS + tl.arange(0, ROWS)  # row and head of each query
    row = place // GROUP
    head = kv_head * GROUP + place % GROUP
    is_row = (row < num_rows) & ((most_rows == 0) | (row < most_rows))
    at = (start + row).to(tl.int64)
    dim = tl.arange(0, PADDED_HEAD)
    mask = is_row[:, None] & (dim < HEAD_SIZE)[None, :]
    asked = query + at[:, None] * stride_query + head[:, None] * stride_query_head
    q = tl.load(asked + dim[None, :], mask=mask, other=0.0)
    return request, num_rows, context, row, head, is_row, at, mask, q


@triton.jit
def part_rows(request, row, at, rows_per_request):  # type: ignore[no-untyped-def]
    """Rows in `Parts` of a request's rows, which are rows `at` of the batch."""
    return tl.where(rows_per_request == 0, at, request.to(tl.int64) * rows_per_request + row)


@triton.jit
def blocks_of(  # type: ignore[no-untyped-def]
    block_table, request, stride_table, key, is_key, BLOCK_SIZE: tl.constexpr
):
    """Cache blocks of a request's keys, by their positions."""
    of_request = block_table + request.to(tl.int64) * stride_table
    return tl.load(of_request + key // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)


@triton.jit
def seen_by(masks, sizes, slot, node, is_node, NODES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bits of the nodes that each node sees; 0 if `is_node` is false, as for bonus tokens."""
    # Shifts by 64 or more are undefined, even if the result is not used.
    bit = tl.minimum(tl.maximum(node, 0), 63).to(tl.int64)
    chain = (tl.full([1], 2, tl.int64) << bit) - 1
    is_tree = tl.load(sizes + slot) > 0
    is_written = is_node & is_tree & (node < NODES)
    seen = tl.load(masks + slot.to(tl.int64) * NODES + bit, mask=is_written, other=0)
    return tl.where(is_tree, seen, tl.where(is_node, chain, 0))


@triton.jit
def depth_of(seen):  # type: ignore[no-untyped-def]
    """Depth of each node: the number of nodes that it sees."""
    bit = tl.arange(0, 64).to(tl.int64)
    return tl.sum(((seen[:, None] >> bit[None, :]) & 1).to(tl.int32), axis=1)


@triton.jit
def weigh(  # type: ignore[no-untyped-def]
    q,  # [ROWS, D]
    cache,  # cache of the K/V head
    at,  # offset of each key in it
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
    """Add a tile of keys: new highest score, sum of weights, and weighted sum of values."""
    dim = tl.arange(0, PADDED_HEAD)
    mask = is_loaded[:, None] & (dim < HEAD_SIZE)[None, :]
    key = cache + at[:, None] + dim[None, :]
    k = tl.load(key, mask=mask, other=0.0).to(q.dtype)
    v = tl.load(key + HEAD_SIZE, mask=mask, other=0.0).to(q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if HAS_SOFTCAP:  # tanh, in a form that does not overflow
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


VARYING = ["num_requests", "most_rows", "rows_per_request", "segments", "num_parts", "stride_table"]
VARYING += ["part_size"]
"""Arguments that differ from batch to batch; kernels must not be recompiled for their values."""


def tile_of(head_size: int, itemsize: int) -> tuple[int, int, int]:
    """Rows and keys of a tile, and stages of loops over keys: with 3, the next tile's keys load
    while one is computed. All sizes fit in 99 KiB of shared memory, which GPUs of capability 8.6,
    8.9 and 12.0 have; others have more."""
    width = _padded(head_size) * itemsize
    return next(tile for most, tile in TILES if width <= most)


TILES = ((256, (64, 32, 3)), (512, (32, 32, 3)), (1024, (16, 16, 3)), (2048, (16, 16, 2)))
"""Results of `tile_of` by the maximum bytes of a padded head."""


def _padded(head_size: int) -> int:
    """Head size in a tile: a power of two, at least 16."""
    return max(16, next_power_of_2(head_size))


def _num_programs(device: torch.device) -> int:
    """Number of programs that run at a time: two on each processor of a GPU."""
    if device.type != "cuda":  # the interpreter, which runs them one after the other
        return 2
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(frozen=True)
class Launch:
    """How both kernels are launched."""

    arguments: tuple[Any, ...]
    """Their last arguments, from the block table on."""
    num_rows: int
    """Maximum rows of all requests together."""
    rows_per_request: int
    """As in `Parts`."""
    num_tiles: int
    """Minimum number of tiles of so many rows, over all K/V heads."""
    num_programs: int
    constants: dict[str, int | bool]

    @classmethod
    def from_batch(
        cls,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: PagedRows,
        trees: TreeSlots,
        scores: Scores,
        *,
        all_requests: bool,
    ) -> Launch:
        """Arguments for query rows [T, H, D] of a batch, and a layer's cache."""
        kv_heads, block_size = kv_cache.shape[1:3]
        heads, head_size = query.shape[1:]
        group, nodes = heads // kv_heads, trees.masks.shape[1]
        # Maximum rows of a request, only for requests with a tree: rows of prompts are left to
        # vLLM. 0: all rows of all requests.
        most_rows = 0 if all_requests else 1 + nodes
        num_rows = min(len(query), most_rows * len(batch.seq_lens) or len(query))
        rows, keys, stages = tile_of(head_size, query.element_size())
        rows = min(rows, max(16, next_power_of_2((1 + nodes) * group)))
        # One kernel for the small batches that gain from trees, and one for all others.
        requests = FEW_REQUESTS if len(batch.seq_lens) <= FEW_REQUESTS else len(trees.slots)
        tensors = batch.block_table, batch.query_start_loc, batch.seq_lens
        of_trees = trees.slots, trees.masks, trees.sizes
        numbers = len(batch.seq_lens), most_rows, scores.scale, scores.softcap
        strides = *query.stride()[:2], *kv_cache.stride()[:3], batch.block_table.stride(0)
        return cls(
            (*tensors, *of_trees, *numbers, *strides),
            num_rows,
            most_rows if num_rows < len(query) else 0,
            triton.cdiv(num_rows * group, rows) * kv_heads,
            _num_programs(query.device),
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
                "PADDED_REQUESTS": next_power_of_2(requests),
                "num_stages": stages,
            },
        )
