"""Context rows that wait to be stored until somebody drafts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_dflash.drafter.context import ContextProjection


class ContextBacklog:
    """Keeps target features back and stores them in one go.

    Projecting one row reads the same weights as projecting a hundred. While nothing is drafted,
    the context of many steps costs little more than that of one.

    Rows are stored at the latest when a request of theirs leaves the batch: its cache blocks may
    be given to another request, or found again by a prefix, from the next step on. What the new
    owner computes comes later and so overwrites what was stored here.
    """

    def __init__(self, context: ContextProjection, capacity: int) -> None:
        """Keep at most `capacity` rows back."""
        self._context = context
        self._capacity = capacity
        self._pieces: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._owners: set[str] = set()
        self._batch: Sequence[str] = ()
        self.num_rows = 0

    def add(
        self,
        features: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        batch: Sequence[str],
    ) -> None:
        """Take rows [C, m * H], positions [C], slots [C] of this batch; the tensors stay."""
        self._pieces.append((features, positions, slots))
        if batch != self._batch:
            self._owners.update(batch)
            self._batch = batch
        self.num_rows += len(features)

    def is_safe(self, batch: Sequence[str]) -> bool:
        """Whether every row belongs to a request that is in the batch."""
        return batch == self._batch or self._owners.issubset(batch)

    def is_full(self) -> bool:
        """Whether more rows are kept back than should be."""
        return self.num_rows > self._capacity

    def store(self) -> int:
        """Store all rows. Returns how many there were."""
        stored = self.num_rows
        if self._pieces:
            features, positions, slots = (
                pieces[0] if len(pieces) == 1 else torch.cat(pieces)
                for pieces in zip(*self._pieces, strict=True)
            )
            self._context.store(features, positions, slots)
            self._pieces.clear()
        self._owners.clear()
        self._batch = ()
        self.num_rows = 0
        return stored
