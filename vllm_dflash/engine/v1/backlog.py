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
MAX_ARRIVED, MAX_ARRIVED_ROWS = 16, 256
"""Steps, and rows of theirs, that are put into the ring together, which spares small copies."""
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
        self._arrived: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._arrived_rows = slice(0, 0)
        """Where in the ring they belong."""

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
        is_full = len(self._arrived) >= MAX_ARRIVED or start != self._arrived_rows.stop
        if is_full or self._arrived_rows.stop - self._arrived_rows.start >= MAX_ARRIVED_ROWS:
            self._take_in()
        stored = self._store(displaced)
        self.rows.put(start, slots.numpy())
        # The features are this step's own; the other two lie in buffers that the next step fills.
        self._arrived.append((features, positions.clone(), slots.clone()))
        first = self._arrived_rows.start if len(self._arrived) > 1 else start
        self._arrived_rows = slice(first, start + count)
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

    def _take_in(self) -> None:
        """Move the rows of the last steps into the ring."""
        if self._arrived:
            for part, ring in enumerate(self.buffers()):
                rows = [arrived[part] for arrived in self._arrived]
                torch.cat(rows, out=ring[self._arrived_rows])
            self._arrived.clear()

    def _store(self, rows: Ints) -> int:
        if len(rows):
            self._take_in()
            index = torch.from_numpy(rows.astype(np.int64))
            self._context.store(self._features[index], self._positions[index], self._slots[index])
            self.rows.free(rows)
        return len(rows)
