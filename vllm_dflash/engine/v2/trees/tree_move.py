"""Makes accepted nodes of draft trees consecutive tokens: moves K/V and features to the rows after
the bonus token's.

A node moves from the row of its number to the row of its depth (from 0), which is never larger. A
program reads a whole path before it writes it. Nothing moves if the path is the tree's first nodes
in order, as in a chain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from vllm.triton_utils import tl, triton
from vllm.utils.math_utils import next_power_of_2

from vllm_dflash.engine.v2.trees.tree_slots import TreeSlots

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

ALIGNED = 4
"""Words of 4 bytes that are moved at a time, whatever the dtype."""
BYTES = 4 * ALIGNED
CHUNK = 128
"""Words of a row that a program moves."""
COLUMNS = 9
"""Columns of the table of layers: address of the cache; address and stride of the block table;
tokens of a block; K/V heads; and in pieces of 16 bytes: keys and values of a head, and the cache's
strides by block, head and token."""


@triton.jit
def _path_of(paths, path_lens, request, NODES: tl.constexpr, PADDED_NODES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Accepted nodes by depth, and which of them must be moved."""
    depth = tl.arange(0, PADDED_NODES)
    is_accepted = depth < tl.load(path_lens + request)
    node = tl.load(paths + request * NODES + depth, mask=is_accepted, other=0)
    return node, is_accepted & (node != depth)


@triton.jit
def _copy(base, source, goal, is_moved, first, width, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy a chunk of rows of `width` words, from offsets `source` to `goal`."""
    column = first + tl.arange(0, CHUNK)
    mask = is_moved[:, None] & (column < width)[None, :]
    words = tl.load(base + source[:, None] + column[None, :], mask=mask)
    tl.debug_barrier()  # a row's source may be another row's goal
    tl.store(base + goal[:, None] + column[None, :], words, mask=mask)


@triton.jit
def _move_cached(  # type: ignore[no-untyped-def]
    layers,  # [L, COLUMNS]
    paths,  # [max R, D]
    path_lens,  # [max R]
    query_start_loc,  # [R + 1]
    seq_lens,  # [R]
    NODES: tl.constexpr,
    PADDED_NODES: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    request = tl.program_id(0)
    layer = layers + tl.program_id(1) * COLUMNS
    depth = tl.arange(0, PADDED_NODES)
    node, is_moved = _path_of(paths, path_lens, request, NODES, PADDED_NODES)
    num_moved = tl.sum(is_moved.to(tl.int32), axis=0)
    width = tl.load(layer + 5).to(tl.int32) * ALIGNED
    chunks = tl.cdiv(width, CHUNK)
    head = tl.program_id(2) // chunks
    if (num_moved == 0) | (head >= tl.load(layer + 4)):
        return
    num_rows = tl.load(query_start_loc + request + 1) - tl.load(query_start_loc + request)
    first = tl.load(seq_lens + request) - num_rows + 1  # position of node 0
    table = tl.load(layer + 1).to(tl.pointer_type(tl.int32)) + request * tl.load(layer + 2)
    block_size = tl.load(layer + 3).to(tl.int32)
    from_block = tl.load(table + (first + node) // block_size, mask=is_moved, other=0)
    to_block = tl.load(table + (first + depth) // block_size, mask=is_moved, other=0)
    # Block 0 is vLLM's null block.
    is_moved = is_moved & (from_block > 0) & (to_block > 0)
    by_block, by_head, by_token = tl.load(layer + 6), tl.load(layer + 7), tl.load(layer + 8)
    cache = tl.multiple_of(tl.load(layer).to(tl.pointer_type(tl.int32)), 4 * ALIGNED)
    source = from_block * by_block + (first + node) % block_size * by_token
    goal = to_block * by_block + (first + depth) % block_size * by_token
    _copy(
        cache + head * by_head * ALIGNED,
        source * ALIGNED,
        goal * ALIGNED,
        is_moved,
        tl.program_id(2) % chunks * CHUNK,
        width,
        CHUNK,
    )


@triton.jit
def _move_rows(  # type: ignore[no-untyped-def]
    rows,  # [T, W]
    paths,  # [max R, D]
    path_lens,  # [max R]
    query_start_loc,  # [R + 1]
    stride_rows,
    width,  # W, in words
    NODES: tl.constexpr,
    PADDED_NODES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    request = tl.program_id(0)
    node, is_moved = _path_of(paths, path_lens, request, NODES, PADDED_NODES)
    if tl.sum(is_moved.to(tl.int32), axis=0) == 0:
        return
    first = tl.load(query_start_loc + request).to(tl.int64) + 1  # row of node 0
    source = (first + node) * stride_rows
    goal = (first + tl.arange(0, PADDED_NODES)) * stride_rows
    _copy(rows, source, goal, is_moved, tl.program_id(1) * CHUNK, width, CHUNK)


class CachedLayer(NamedTuple):
    """Cache of a layer's keys and values."""

    name: str
    kv_cache: torch.Tensor
    """[blocks, K/V heads, block size, 2 D]; only the last dimension must be contiguous."""
    block_table: torch.Tensor
    """Blocks of the batch's requests, [max R, blocks of a request] int32; persistent."""
    block_size: int
    """Tokens of a block of the table."""


def cached_layers(
    runner: GPUModelRunner, layers: Mapping[str, AttentionLayerBase]
) -> list[CachedLayer]:
    """Caches of these layers, each with the block table of its cache group. Layers that share
    another's cache are listed like others."""
    tables, groups = runner.block_tables, runner.kv_cache_config.kv_cache_groups
    of_groups = zip(groups, tables.input_block_tables, tables.block_sizes, strict=True)
    return [
        CachedLayer(name, layers[name].kv_cache, table, size)
        for group, table, size in of_groups
        for name in group.layer_names
        if name in layers
    ]


def move_unsupported_reason(layers: Sequence[CachedLayer]) -> str | None:
    """Reason why K/V of these layers cannot be moved; None if they can.

    The mover uses the runner's block tables. A backend that splits their blocks into smaller ones
    has its own table.
    """
    for name, cache, _, size in layers:
        if cache.shape[2] != size:
            return f"its attention splits blocks of {size} tokens ({name})"
        pieces = *cache.stride()[:3], cache.shape[-1]
        if any(each * cache.element_size() % BYTES for each in pieces):
            return f"keys and values are not whole pieces of {BYTES} bytes ({name})"
    return None


class CacheMover:
    """Moves keys and values of accepted nodes, for all layers in one launch."""

    def __init__(self, layers: Sequence[CachedLayer]) -> None:
        """Take caches at their final addresses; one that is listed twice is moved once."""
        # Layers of several groups may share memory, each with its own blocks.
        found = {(one.kv_cache.data_ptr(), one.block_table.data_ptr()): one for one in layers}
        rows = []
        for (address, _), (_, cache, table, size) in found.items():
            assert cache.stride(-1) == 1
            sizes = cache.shape[-1], *cache.stride()[:3]
            width, *strides = (each * cache.element_size() // BYTES for each in sizes)
            block = table.data_ptr(), table.stride(0), size
            rows.append((address, *block, cache.shape[1], width, *strides))
        self.most_pieces = max(row[4] * triton.cdiv(row[5] * ALIGNED, CHUNK) for row in rows)
        self.layers = torch.tensor(rows, dtype=torch.int64, device=layers[0].kv_cache.device)

    def move(self, trees: TreeSlots, batch: InputBatch) -> None:
        """Move keys and values of accepted nodes; `batch`: R requests, as the target ran with
        it."""
        depth = trees.paths.shape[1]
        _move_cached[(len(batch.seq_lens), len(self.layers), self.most_pieces)](
            self.layers,
            trees.paths,
            trees.path_lens,
            batch.query_start_loc,
            batch.seq_lens,
            NODES=depth,
            PADDED_NODES=next_power_of_2(depth),
            ALIGNED=ALIGNED,
            CHUNK=CHUNK,
            COLUMNS=COLUMNS,
        )


def move_rows(rows: torch.Tensor, trees: TreeSlots, query_start_loc: torch.Tensor) -> None:
    """Move rows [T, W] of accepted nodes to the rows after their bonus tokens', in place.

    `query_start_loc`: first row of each request and the total, [R + 1].
    """
    words = rows.view(torch.int32)
    depth, width = trees.paths.shape[1], words.shape[1]
    grid = len(query_start_loc) - 1, triton.cdiv(width, CHUNK)
    _move_rows[grid](
        words,
        trees.paths,
        trees.path_lens,
        query_start_loc,
        words.stride(0),
        width,
        NODES=depth,
        PADDED_NODES=next_power_of_2(depth),
        CHUNK=CHUNK,
    )
