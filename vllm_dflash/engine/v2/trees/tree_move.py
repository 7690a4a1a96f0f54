"""Makes accepted nodes of draft trees consecutive tokens: moves K/V and features to the rows after
the bonus token's.

A node moves from the row of its number to the row of its depth (from 0), which is never larger. A
program reads a whole path before it writes it. Nothing moves if the path is the tree's first nodes
in order, as in a chain.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from vllm.triton_utils import tl, triton
from vllm.utils.math_utils import next_power_of_2

from vllm_dflash.engine.v2.trees.tree_kernels import RowsOfBatch

if TYPE_CHECKING:
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


class Paths(NamedTuple):
    """Accepted nodes of R requests' trees."""

    nodes: torch.Tensor
    """By depth, from the bonus token's child on, [max R, D] int32."""
    lengths: torch.Tensor
    """Number of accepted nodes; 0: there was no tree, or none was accepted, [max R] int32."""


class CachedLayer(NamedTuple):
    """Cache of a layer's keys and values."""

    kv_cache: torch.Tensor
    """[blocks, K/V heads, block size, 2 D]; only the last dimension must be contiguous."""
    block_table: torch.Tensor
    """Blocks of the batch's requests, [max R, blocks of a request] int32; persistent."""


def cached_layers(runner: GPUModelRunner, names: Collection[str]) -> list[CachedLayer]:
    """Caches of the named attention layers, each with the block table of its cache group. Layers
    that share another's cache are listed like others."""
    context = runner.compilation_config.static_forward_context
    tables = runner.block_tables.input_block_tables
    groups = runner.kv_cache_config.kv_cache_groups
    return [
        CachedLayer(context[name].kv_cache, table)
        for group, table in zip(groups, tables, strict=True)
        for name in group.layer_names
        if name in names
    ]


def why_not_moved(runner: GPUModelRunner, names: Collection[str]) -> str | None:
    """Reason why K/V of these layers cannot be moved; None if they can.

    The mover uses the runner's block tables. A backend that splits their blocks into smaller ones
    has its own table.
    """
    sizes = runner.block_tables.block_sizes
    for size, group in zip(sizes, runner.kv_cache_config.kv_cache_groups, strict=True):
        for name in group.layer_names:
            if name not in names:
                continue
            cache = runner.compilation_config.static_forward_context[name].kv_cache
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
        for (address, _), (cache, table) in found.items():
            assert cache.stride(-1) == 1
            sizes = cache.shape[-1], *cache.stride()[:3]
            width, *strides = (each * cache.element_size() // BYTES for each in sizes)
            block = table.data_ptr(), table.stride(0), cache.shape[2]
            rows.append((address, *block, cache.shape[1], width, *strides))
        self.most_pieces = max(row[4] * triton.cdiv(row[5] * ALIGNED, CHUNK) for row in rows)
        self.layers = torch.tensor(rows, dtype=torch.int64, device=layers[0].kv_cache.device)

    def move(self, paths: Paths, batch: RowsOfBatch) -> None:
        """Move keys and values along `paths`; `batch`: R requests, as the target ran with it."""
        num_nodes = paths.nodes.shape[1]
        _move_cached[(len(batch.seq_lens), len(self.layers), self.most_pieces)](
            self.layers,
            *paths,
            batch.query_start_loc,
            batch.seq_lens,
            NODES=num_nodes,
            PADDED_NODES=next_power_of_2(num_nodes),
            ALIGNED=ALIGNED,
            CHUNK=CHUNK,
            COLUMNS=COLUMNS,
        )


def move_rows(rows: torch.Tensor, paths: Paths, query_start_loc: torch.Tensor) -> None:
    """Move rows [T, W] of accepted nodes to the rows after their bonus tokens', in place.

    `query_start_loc`: first row of each request and the total, [R + 1].
    """
    words = rows.view(torch.int32)
    num_nodes, width = paths.nodes.shape[1], words.shape[1]
    grid = len(query_start_loc) - 1, triton.cdiv(width, CHUNK)
    _move_rows[grid](
        words,
        *paths,
        query_start_loc,
        words.stride(0),
        width,
        NODES=num_nodes,
        PADDED_NODES=next_power_of_2(num_nodes),
        CHUNK=CHUNK,
    )
