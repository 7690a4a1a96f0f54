"""Context rows that wait to be stored until their request is drafted."""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence

import numpy as np
import torch

from vllm_dflash.model.context_projection import ContextProjection
from vllm_dflash.planning import Bools, Ints

NOBODY = -1
MAX_BYTES = 256 << 20
MAX_ROWS = 16384
MAX_ARRIVED, MAX_ARRIVED_ROWS = 16, 256
"""Steps, and rows of theirs, that are put into the ring together, which spares small copies."""


class ContextBacklog:
    """Keeps target features back, by request, and stores a request's when it is drafted.

    Projecting context costs a few percent of the target's own work, for requests that are never
    drafted as well. So rows wait here, and those of a request that ends undrafted are dropped.
    Storing many rows at a time is cheaper, too: one row reads the same weights as a hundred.

    The rows lie in a ring. Where it is full, the oldest are stored after all, so nothing is
    missing that a running request could need.
    """

    def __init__(
        self, context: ContextProjection, width: int, dtype: torch.dtype, max_requests: int
    ) -> None:
        """For features of `width` numbers, of `max_requests` at a time."""
        self._context = context
        self.capacity = int(min(MAX_ROWS, MAX_BYTES // (width * dtype.itemsize)))
        self._features = torch.empty(self.capacity, width, dtype=dtype)  # taken up as it fills
        self._positions = torch.empty(self.capacity, dtype=torch.int64)
        self._slots = torch.empty(self.capacity, dtype=torch.int64)
        self._owner = np.full(self.capacity, NOBODY)
        self._next = 0
        self._number: dict[str, int] = {}
        self._free = list(range(max_requests))
        self._was_drafted = np.zeros(max_requests, dtype=bool)
        self._batch: Sequence[str] = ()
        self._arrived: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, Ints]] = []
        self._num_arrived = 0

    def buffers(self) -> list[torch.Tensor]:
        """What it allocated once and for all."""
        return [self._features, self._positions, self._slots]

    def update_batch(
        self, batch: Sequence[str], running: Container[str], *, may_return: bool
    ) -> int:
        """Make room for the requests of a batch; call before `add`.

        The cache blocks of a request that has left may be given to another one from this step
        on. Stored now, its rows come before what the new owner computes, which overwrites them.

        Args:
            batch: ids of this step's requests.
            running: ids of all requests that go on some time.
            may_return: whether cached blocks of ended requests may be found again by a prefix.

        Returns:
            How many rows were stored.
        """
        if batch == self._batch:
            return 0
        settled = self._settle()
        self._batch = batch
        left = [name for name in self._number if name not in set(batch)]
        numbers = np.array([self._number.pop(name) for name in left], dtype=np.int64)
        keep = [
            name in running or (may_return and bool(self._was_drafted[number]))
            for name, number in zip(left, numbers, strict=True)
        ]
        stored = self._store_rows(self._rows_of(numbers[keep])) if any(keep) else 0
        self._owner[self._rows_of(numbers)] = NOBODY
        self._free.extend(numbers.tolist())
        for name in batch:
            if name not in self._number:
                self._number[name] = self._free.pop()
                self._was_drafted[self._number[name]] = False
        return settled + stored

    def forget(self, resumed: Collection[str]) -> None:
        """Drop rows of requests that lost their cache blocks and are computed again.

        Those that were preempted have left the batch before, and `update_batch` saw to their rows;
        but a reset of the prefix cache preempts and resumes requests between two steps.
        """
        numbers = [self._number[name] for name in resumed if name in self._number]
        if numbers:
            self._settle()
            self._owner[self._rows_of(np.array(numbers, dtype=np.int64))] = NOBODY

    def add(
        self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, counts: Ints
    ) -> int:
        """Take rows [C, m * H], positions [C] and slots [C], `counts` of each request [R].

        Returns:
            How many rows were stored, to make room or because they are too many to keep.
        """
        count = len(features)
        if count > self.capacity // 4:
            self._context.store(features, positions, slots)
            return count
        # The features are this step's own; the other two lie in buffers that the next step fills.
        owner = np.repeat(self._numbers(), counts)
        self._arrived.append((features, positions.clone(), slots.clone(), owner))
        self._num_arrived += count
        most = min(MAX_ARRIVED_ROWS, self.capacity // 4)
        if len(self._arrived) < MAX_ARRIVED and self._num_arrived < most:
            return 0
        return self._settle()

    def _settle(self) -> int:
        """Move the rows of the last steps into the ring; returns how many had to make room."""
        if not self._arrived:
            return 0
        features, positions, slots, owners = zip(*self._arrived, strict=True)
        self._arrived.clear()
        self._num_arrived = 0
        owner = np.concatenate(owners)
        count = len(owner)
        if self._next + count > self.capacity:
            self._next = 0
        here = slice(self._next, self._next + count)
        stored = self._store_rows(here.start + np.flatnonzero(self._owner[here] != NOBODY))
        torch.cat(features, out=self._features[here])
        torch.cat(positions, out=self._positions[here])
        torch.cat(slots, out=self._slots[here])
        self._owner[here] = owner
        self._next += count
        return stored

    def pending(self) -> Ints:
        """Rows kept back of each request of the batch, [R]."""
        self._settle()
        per_number = np.bincount(self._owner + 1, minlength=len(self._was_drafted) + 1)
        return per_number[1 + self._numbers()]

    def store(self, drafted: Bools) -> int:
        """Store all rows of the drafted requests of the batch, [R]. Returns how many."""
        numbers = self._numbers()[drafted]
        self._was_drafted[numbers] = True
        return self._settle() + self._store_rows(self._rows_of(numbers))

    def _numbers(self) -> Ints:
        return np.array([self._number[name] for name in self._batch], dtype=np.int64)

    def _rows_of(self, numbers: Ints) -> Ints:
        wanted = np.zeros(len(self._was_drafted) + 1, dtype=bool)  # the last one is nobody's
        wanted[numbers] = True
        return np.flatnonzero(wanted[self._owner])

    def _store_rows(self, rows: Ints) -> int:
        if len(rows):
            index = torch.from_numpy(rows)
            self._context.store(self._features[index], self._positions[index], self._slots[index])
            self._owner[rows] = NOBODY
        return len(rows)
