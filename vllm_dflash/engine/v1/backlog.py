"""Context rows that wait to be stored until a request is drafted that needs them."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch

from vllm_dflash.engine.v1.waiting_rows import WaitingRows, slots_in
from vllm_dflash.model.context_projection import ContextProjection
from vllm_dflash.planning import Ints

MAX_BYTES = 256 << 20
MAX_ROWS = 16384
STORED_AHEAD = 256
"""Where the ring is full, so many rows are stored at a time: one reads the same weights."""


class ContextBacklog:
    """Keeps target features back, by cache slot, and stores those of a request that is drafted.

    Projecting context costs a few percent of the target's own work, for requests that are never
    drafted as well. So rows wait here. Rows of blocks that are given to somebody else are dropped.
    Storing many rows at a time is cheaper, too.

    The rows lie in a ring. Where it is full, the oldest are stored after all, so nothing is
    missing that a request could need, whether it computed the block or found it in the cache.
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
        capacity = min(MAX_ROWS, MAX_BYTES // (width * dtype.itemsize))
        self.rows = WaitingRows(capacity, num_slots, block_size)
        self._features = torch.empty(capacity, width, dtype=dtype)  # taken up as it fills
        self._positions = torch.empty(capacity, dtype=torch.int64)
        self._slots = torch.empty(capacity, dtype=torch.int64)

    def buffers(self) -> list[torch.Tensor]:
        """What it allocated once and for all."""
        return [self._features, self._positions, self._slots]

    def drop(self, blocks: Collection[int], block_size: int) -> None:
        """Blocks that have a new owner, or none that could be found again; before `add`."""
        if blocks:
            self.rows.drop(slots_in(np.array([*blocks]), block_size))

    def add(self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> int:
        """Take rows [C, m * H], their positions [C] and slots [C].

        Returns:
            How many rows were stored, to make space or because they are too many to keep.
        """
        count, capacity = len(features), self.rows.capacity
        if count > capacity // 4:
            return self.store_new(features, positions, slots)
        start, displaced = self.rows.claim(count, min(STORED_AHEAD, capacity // 4))
        stored = self._store(displaced)
        self.rows.put(start, slots.numpy())
        for ring, rows in zip(self.buffers(), (features, positions, slots), strict=True):
            ring[start : start + count] = rows
        return stored

    def store_new(
        self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> int:
        """Store rows that need not wait, as for `add`. Returns how many they are."""
        self.rows.drop(slots.numpy())
        self._context.store(features, positions, slots)
        return len(features)

    def count(self, block_table: Ints, context_lens: Ints) -> Ints:
        """Rows that wait for each request's context, [R]; block table [R, B]."""
        return self.rows.count(block_table, context_lens)

    def store(self, block_table: Ints, context_lens: Ints) -> int:
        """Store all that waits for these requests' contexts. Returns how many rows that was."""
        return self._store(self.rows.of(block_table, context_lens))

    def _store(self, rows: Ints) -> int:
        if len(rows):
            index = torch.from_numpy(rows.astype(np.int64))
            self._context.store(self._features[index], self._positions[index], self._slots[index])
            self.rows.free(rows)
        return len(rows)
