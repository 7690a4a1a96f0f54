"""Track which context rows an engine's drafter has stored and which wait, on either model runner.

The cache's contents are known from watching it being written to; waiting rows are read from the
backlog without settling it. Nothing here changes what is observed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from vllm import LLM
from vllm.v1.request import Request

from support.engines import USES_V2, proposer_of, scheduler_of
from vllm_dflash.engine.v1.backlog import ContextBacklog
from vllm_dflash.engine.warm import tensors_of


class Row(NamedTuple):
    """One token's context."""

    position: int
    features: int
    """A digest of the features."""


class ContextRows:
    """Watches rows being handed over and stored, and compares them with what requests need."""

    def __init__(self, llm: LLM) -> None:
        self.scheduler = scheduler_of(llm)
        self.stored: dict[int, Row] = {}
        """Row in each slot of the cache."""
        self._given: dict[int, Row] = {}
        """Row that the step that computed a slot's token handed over for it."""
        self._drafter: Any = proposer_of(llm)
        self._backlog: ContextBacklog | None = None if USES_V2 else self._drafter.host.backlog
        self._watched: list[tuple[Any, str]] = []
        context = self._drafter.model.context
        self._watch(context, "store_fused" if USES_V2 else "store", self._on_store)
        if self._backlog is not None:
            for way_in in ("add", "store_new"):
                self._watch(self._backlog, way_in, self._on_add)

    def _watch(self, owner: Any, name: str, tell: Any) -> None:
        original = getattr(owner, name)

        def watched(*rows: Any) -> Any:
            tell(*rows)
            return original(*rows)

        setattr(owner, name, watched)
        self._watched.append((owner, name))

    def stop(self) -> None:
        """Stop watching."""
        for owner, name in self._watched:
            delattr(owner, name)

    def _on_add(self, features: Any, positions: Any, slots: Any) -> None:
        self._given.update(rows_by_slot(features, positions, slots))

    def _on_store(self, features: Any, positions: Any, slots: Any) -> None:
        rows = dict(rows_by_slot(features, positions, slots[0] if USES_V2 else slots))
        self.stored.update(rows)
        if self._backlog is None:
            self._given.update(rows)

    def slots(self, request: Request) -> list[int]:
        """Return the slots of a running request by position, as far as its blocks go."""
        manager = self.scheduler.kv_cache_manager
        (blocks,) = manager.get_block_ids(request.request_id)
        size = manager.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        return [block * size + offset for block in blocks for offset in range(size)]

    def missing(self) -> list[tuple[str, int]]:
        """Return computed tokens of running requests whose own row is neither stored nor waiting.

        With asynchronous scheduling, computed tokens are counted before they are known; these are
        ignored.
        """
        return [
            (request.request_id, position)
            for request in self.scheduler.running
            for position, slot in enumerate(
                self.slots(request)[: min(request.num_computed_tokens, request.num_tokens - 1)]
            )
            if (row := self._row(slot)) is None
            or row != self._given.get(slot)
            or row.position != position
        ]

    def surplus(self) -> list[tuple[str, int]]:
        """Return rows stored after the computed tokens of running requests that alone own them.
        Those that a block's last owner has left have other positions."""
        return [
            (request.request_id, position)
            for request in self.scheduler.running
            for position, slot in enumerate(self.slots(request))
            if position >= request.num_computed_tokens
            and (row := self.stored.get(slot)) is not None
            and row.position == position
        ]

    def _row(self, slot: int) -> Row | None:
        """Return what the slot holds once the backlog has caught up."""
        backlog = self._backlog
        number = -1 if backlog is None else int(backlog._row_of[slot])
        if backlog is None or number < 0:
            return self.stored.get(slot)
        features, position, goes_to = waiting_row(backlog, number)
        return Row(int(position), digest(features)) if goes_to == slot else None


def rows_by_slot(
    features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
) -> Iterable[tuple[int, Row]]:
    """Return each row's slot, and the row; rows of slot -1 are not stored."""
    rows = zip(slots.tolist(), positions.tolist(), features, strict=True)
    return ((slot, Row(at, digest(of_row))) for slot, at, of_row in rows if slot >= 0)


def digest(features: torch.Tensor) -> int:
    """Return the same number for the same bits."""
    return hash(features.cpu().contiguous().view(torch.uint8).numpy().tobytes())


def waiting_row(
    backlog: ContextBacklog, number: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what is to be stored from a row of the ring: features, position and slot."""
    features, positions = (ring[number] for ring in tensors_of(backlog))
    return features, positions, torch.tensor(backlog._slot_of[number])
