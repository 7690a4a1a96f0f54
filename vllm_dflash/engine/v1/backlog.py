"""Context rows that wait to be stored until a request is drafted that needs them."""

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
"""Where the ring is full, so many rows are stored at a time: one reads the same weights."""
EMPTY = -1


class ContextBacklog:
    """Keeps target features back, by cache slot, and stores those of a request that is drafted.

    Projecting context costs a few percent of the target's own work, for requests that are never
    drafted as well. So rows wait here. Rows of blocks that are given to somebody else are dropped.
    Storing many rows at a time is cheaper, too.

    The rows lie in a ring. Where it is full, the oldest are stored after all, so nothing is
    missing that a request could need, whether it computed the block or found it in the cache: rows
    are known by their slot and not by their request.
    """

    def __init__(
        self,
        context: ContextProjection,
        width: int,
        dtype: torch.dtype,
        *,
        num_slots: int,
        block_size: int,
    ) -> None:
        """For features of `width` numbers, and a cache of so many slots in such blocks."""
        self._context = context
        self._block_size = block_size
        capacity = min(MAX_ROWS, MAX_BYTES // (width * dtype.itemsize))
        self._features = torch.empty(capacity, width, dtype=dtype)  # taken up as it fills
        self._positions = torch.empty(capacity, dtype=torch.int64)
        self._slot_of = np.full(capacity, EMPTY)
        """What each row of the ring waits for."""
        self._row_of = np.full(num_slots, EMPTY, dtype=np.int32)
        """What waits for each slot."""
        self._in_block = np.zeros(-(-num_slots // block_size), dtype=np.int32)
        """Rows that wait for each block."""
        self._next = self._count = 0

    def __len__(self) -> int:
        """How many rows wait."""
        return self._count

    def drop(self, blocks: Collection[int], block_size: int) -> None:
        """Blocks that have a new owner, or none that could be found again; before `add`."""
        if blocks:
            self._drop(slots_in(np.array([*blocks]), block_size))

    def add(self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> int:
        """Take rows [C, m * H], their positions [C] and slots [C].

        Returns:
            How many rows were stored, to make space or because they are too many to keep.
        """
        count, most = len(features), len(self._slot_of) // 4
        if count > most:
            return self.store_new(features, positions, slots)
        if self._next + count > len(self._slot_of):
            self._next = 0
        start, self._next = self._next, self._next + count
        rows, stored = slice(start, self._next), 0
        if (self._slot_of[rows] != EMPTY).any():  # the oldest, and those soon behind
            here = self._slot_of[start : start + max(count, min(STORED_AHEAD, most))]
            stored = self._store(start + np.flatnonzero(here != EMPTY))
        self._features[rows], self._positions[rows] = features, positions
        waiting = slots.numpy()
        self._drop(waiting)
        self._slot_of[rows] = waiting
        self._row_of[waiting] = np.arange(start, self._next)
        np.add.at(self._in_block, waiting // self._block_size, 1)
        self._count += count
        return stored

    def store_new(
        self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> int:
        """Store rows that need not wait, as for `add`. Returns how many they are."""
        self._drop(slots.numpy())
        self._context.store(features, positions, slots)
        return len(features)

    def count(self, block_table: Ints, context_lens: Ints) -> Ints:
        """Rows that wait for slots of each request's context, [R].

        Args:
            block_table: blocks of each request, [R, B].
            context_lens: tokens in them, [R].
        """
        if not self._count:
            return np.zeros(len(context_lens), dtype=np.int64)
        used = self._used(context_lens)
        return (self._in_block[block_table[:, : used.shape[1]]] * used).sum(axis=1)

    def store(self, block_table: Ints, context_lens: Ints) -> int:
        """Store all that waits for these requests' contexts. Returns how many rows that was."""
        if not self._count:
            return 0
        used = self._used(context_lens)
        blocks = np.unique(block_table[:, : used.shape[1]][used])
        blocks = blocks[self._in_block[blocks] > 0]
        return self._store(self._rows_of(slots_in(blocks, self._block_size)))

    def _drop(self, slots: Ints) -> None:
        """Nothing waits for these slots any longer; some may be named twice."""
        rows = self._rows_of(slots) if self._count else slots[:0]
        if len(rows):
            self._free(np.unique(rows))

    def _free(self, rows: Ints) -> None:
        """These rows wait no longer; each once."""
        slots = self._slot_of[rows]
        self._row_of[slots] = EMPTY
        self._slot_of[rows] = EMPTY
        np.subtract.at(self._in_block, slots // self._block_size, 1)
        self._count -= len(rows)

    def _store(self, rows: Ints) -> int:
        if len(rows):
            index, slots = torch.from_numpy(rows), torch.from_numpy(self._slot_of[rows])
            self._context.store(self._features[index], self._positions[index], slots)
            self._free(rows)
        return len(rows)

    def _used(self, context_lens: Ints) -> Bools:
        """Which columns of a block table these contexts use, [R, most of their blocks]."""
        num_blocks = -(-context_lens // self._block_size)
        return np.arange(num_blocks.max(initial=0)) < num_blocks[:, None]

    def _rows_of(self, slots: Ints) -> Ints:
        rows = self._row_of[slots].astype(np.int64)
        return rows[rows != EMPTY]


def slots_in(blocks: Ints, block_size: int) -> Ints:
    """All slots of these blocks."""
    return (blocks[:, None].astype(np.int64) * block_size + np.arange(block_size)).ravel()


def useless_blocks(
    ended: Collection[CachedRequestState], group: int, block_size: int, *, caches_prefixes: bool
) -> list[int]:
    """Blocks of requests that have ended in which no later request can find a prefix.

    A block can be found if it was filled; the last token of a request never was computed.
    """
    useless: list[int] = []
    for request in ended:
        filled = (request.num_tokens - 1) // block_size if caches_prefixes else 0
        useless += request.block_ids[group][filled:]
    return useless
