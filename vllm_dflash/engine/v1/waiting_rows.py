"""Which context rows wait, and for which cache slot: the arithmetic of the backlog, in numpy."""

from __future__ import annotations

import numpy as np

from vllm_dflash.planning import Bools, Ints

EMPTY = -1


class WaitingRows:
    """A ring of rows, each of which waits for a slot of the drafter's cache.

    Rows are known by their slot and not by their request: a cached block that another request is
    given brings the rows along that wait for it, whoever computed them.
    """

    def __init__(self, capacity: int, num_slots: int, block_size: int) -> None:
        """A ring of `capacity` rows, for a cache of `num_slots` in blocks of `block_size`."""
        self.capacity = capacity
        self.block_size = block_size
        self._slot_of = np.full(capacity, EMPTY)
        self._row_of = np.full(num_slots, EMPTY, dtype=np.int32)
        self._in_block = np.zeros(-(-num_slots // block_size), dtype=np.int32)
        self._next = self._count = 0

    def __len__(self) -> int:
        """How many rows wait."""
        return self._count

    def claim(self, count: int, ahead: int) -> tuple[int, Ints]:
        """Go on by `count` rows of the ring.

        Args:
            count: at most `capacity`.
            ahead: how many rows to look ahead at least, so that few are displaced often.

        Returns:
            The first of them, and the rows that still wait there or soon behind: the oldest. They
            are to be stored and freed.
        """
        if self._next + count > self.capacity:
            self._next = 0
        start, self._next = self._next, self._next + count
        if (self._slot_of[start : start + count] == EMPTY).all():
            return start, np.zeros(0, dtype=np.int64)
        here = self._slot_of[start : start + max(count, ahead)]
        return start, start + np.flatnonzero(here != EMPTY)

    def put(self, start: int, slots: Ints) -> None:
        """Rows from `start` on wait for these slots, [C]; others that did no longer do."""
        self.drop(slots)
        self._slot_of[start : start + len(slots)] = slots
        self._row_of[slots] = np.arange(start, start + len(slots))
        np.add.at(self._in_block, slots // self.block_size, 1)
        self._count += len(slots)

    def free(self, rows: Ints) -> None:
        """These rows wait no longer; each once."""
        slots = self._slot_of[rows]
        self._row_of[slots] = EMPTY
        self._slot_of[rows] = EMPTY
        np.subtract.at(self._in_block, slots // self.block_size, 1)
        self._count -= len(rows)

    def drop(self, slots: Ints) -> None:
        """Nothing waits for these slots any longer; some may be named twice."""
        rows = self._rows_of(slots) if self._count else slots[:0]
        if len(rows):
            self.free(np.unique(rows))

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

    def of(self, block_table: Ints, context_lens: Ints) -> Ints:
        """Rows that wait for slots of these requests' contexts, each once."""
        if not self._count:
            return np.zeros(0, dtype=np.int64)
        used = self._used(context_lens)
        blocks = np.unique(block_table[:, : used.shape[1]][used])
        blocks = blocks[self._in_block[blocks] > 0]
        return self._rows_of(slots_in(blocks, self.block_size))

    def _used(self, context_lens: Ints) -> Bools:
        """Which columns of a block table these contexts use, [R, most of their blocks]."""
        num_blocks = -(-context_lens // self.block_size)
        return np.arange(num_blocks.max(initial=0)) < num_blocks[:, None]

    def _rows_of(self, slots: Ints) -> Ints:
        rows = self._row_of[slots]
        return rows[rows != EMPTY]


def slots_in(blocks: Ints, block_size: int) -> Ints:
    """All slots of these blocks."""
    return (blocks[:, None].astype(np.int64) * block_size + np.arange(block_size)).ravel()
