"""Context rows that are stored only when a request that needs them is drafted."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from vllm_dflash.model.context_projection import ContextProjection
from vllm_dflash.planning import Bools, Ints

MAX_BYTES = 256 << 20
MAX_ROWS = 16384
STORED_AHEAD = 256
"""Rows stored at a time when the ring is full: a single row would read the same weights."""
EMPTY = -1


class ContextBacklog:
    """Holds target features, by cache slot, until a request that needs them is drafted.

    Projecting context costs a few percent of the target's own work, also for requests that are
    never drafted. So rows wait here, and rows of blocks that get a new owner are dropped. Storing
    many rows at a time is also cheaper.

    The rows are in a ring. When it is full, the oldest rows are stored, so no request's context is
    ever incomplete. That includes blocks found in the prefix cache, because rows are identified by
    slot, not by request.
    """

    def __init__(
        self,
        context: ContextProjection,
        width: int,
        dtype: torch.dtype,
        *,
        num_slots: int,
        page_size: int,
    ) -> None:
        """Make an empty backlog.

        Args:
            context: stores the rows.
            width: values per feature row, m * H.
            dtype: dtype of the features.
            num_slots: slots of the cache.
            page_size: slots per block in the block tables.
        """
        self._context = context
        self._page_size = page_size
        capacity = min(MAX_ROWS, MAX_BYTES // (width * dtype.itemsize))
        self._features = torch.empty(capacity, width, dtype=dtype)
        self._features.fill_(0)  # the first use of each page of memory takes time: not in a step
        self._bytes = self._features.view(torch.uint8).numpy()
        """The same memory. numpy copies a step's few rows in a fifth of torch's time, which wakes
        other threads for it."""
        self._positions = torch.empty(capacity, dtype=torch.int64)
        self._slot_of = np.full(capacity, EMPTY)
        """Slot of each row of the ring, or `EMPTY`."""
        self._row_of = np.full(num_slots, EMPTY, dtype=np.int32)
        """Row of the ring that waits for each slot, or `EMPTY`."""
        self._in_block = np.zeros(-(-num_slots // page_size), dtype=np.int32)
        """Number of waiting rows of each block."""
        self._next = self._count = 0

    def drop(self, blocks: Collection[int], page_size: int) -> None:
        """Drop the rows of blocks that have a new owner, or that no request can find again.

        Call before `add`. `page_size`: slots per block here, which may differ from the backlog's.
        """
        if blocks:
            self._drop(slots_in(np.array([*blocks]), page_size))

    def add(self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> int:
        """Add rows [C, m * H] with their positions [C] and slots [C].

        Returns:
            Number of rows stored, to make space or because the new rows are too many to keep.
        """
        count, most = len(features), len(self._slot_of) // 4
        if count > most:
            return self.store_new(features, positions, slots)
        if self._next + count > len(self._slot_of):
            self._next = 0
        start, self._next = self._next, self._next + count
        rows, stored = slice(start, self._next), 0
        if (self._slot_of[rows] != EMPTY).any():  # the oldest rows, and some after them
            here = self._slot_of[start : start + max(count, min(STORED_AHEAD, most))]
            stored = self._store(start + np.flatnonzero(here != EMPTY))
        self._bytes[rows] = features.contiguous().view(torch.uint8).numpy()
        self._positions[rows] = positions
        waiting = slots.numpy()
        self._drop(waiting)
        self._slot_of[rows] = waiting
        self._row_of[waiting] = np.arange(start, self._next)
        np.add.at(self._in_block, waiting // self._page_size, 1)
        self._count += count
        return stored

    def store_new(
        self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> int:
        """Store rows at once; arguments as for `add`. Returns their number."""
        self._drop(slots.numpy())
        self._context.store(features, positions, slots)
        return len(features)

    def count(self, block_table: Ints, context_lens: Ints) -> Ints:
        """Number of waiting rows of each request's context, [R].

        Args:
            block_table: blocks of each request, [R, B].
            context_lens: tokens of context of each request, [R].
        """
        if not self._count:
            return np.zeros(len(context_lens), dtype=np.int64)
        used = self._used(context_lens)
        return (self._in_block[block_table[:, : used.shape[1]]] * used).sum(axis=1)

    def store(self, block_table: Ints, context_lens: Ints) -> int:
        """Store all waiting rows of these requests' contexts. Returns their number."""
        if not self._count:
            return 0
        used = self._used(context_lens)
        blocks = np.unique(block_table[:, : used.shape[1]][used])
        blocks = blocks[self._in_block[blocks] > 0]
        return self._store(self._rows_of(slots_in(blocks, self._page_size)))

    def _drop(self, slots: Ints) -> None:
        """Drop the rows that wait for these slots; slots may repeat."""
        rows = self._rows_of(slots) if self._count else slots[:0]
        if len(rows):
            self._free(np.unique(rows))

    def _free(self, rows: Ints) -> None:
        """Free these rows of the ring; they must be distinct."""
        slots = self._slot_of[rows]
        self._row_of[slots] = EMPTY
        self._slot_of[rows] = EMPTY
        np.subtract.at(self._in_block, slots // self._page_size, 1)
        self._count -= len(rows)

    def _store(self, rows: Ints) -> int:
        if len(rows):
            index, slots = torch.from_numpy(rows), torch.from_numpy(self._slot_of[rows])
            self._context.store(self._features[index], self._positions[index], slots)
            self._free(rows)
        return len(rows)

    def _used(self, context_lens: Ints) -> Bools:
        """Which columns of a block table each context uses, [R, most blocks of any]."""
        num_blocks = -(-context_lens // self._page_size)
        return np.arange(num_blocks.max(initial=0)) < num_blocks[:, None]

    def _rows_of(self, slots: Ints) -> Ints:
        rows = self._row_of[slots].astype(np.int64)
        return rows[rows != EMPTY]


def slots_in(blocks: Ints, page_size: int) -> Ints:
    """All slots of these blocks."""
    return (blocks[:, None].astype(np.int64) * page_size + np.arange(page_size)).ravel()


def useless_cache_blocks(
    ended: Collection[CachedRequestState], group: int, page_size: int, *, caches_prefixes: bool
) -> list[int]:
    """Blocks of ended requests that no later request can find as a cached prefix.

    Only full blocks can be found, and the last token of a request was never computed.

    `page_size`: slots per block of the group. Without `caches_prefixes`, all blocks are useless.
    """
    useless: list[int] = []
    for request in ended:
        filled = (request.num_tokens - 1) // page_size if caches_prefixes else 0
        useless += request.block_ids[group][filled:]
    return useless
