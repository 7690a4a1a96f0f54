"""Which rows of context an engine's drafter has stored, on either model runner."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm import LLM
from vllm.v1.request import Request

from support.engines import proposer_of
from vllm_dflash.engine.v1.backlog import ContextBacklog


class ContextRows:
    """Watches the drafter's cache being written to, and compares it with what requests need."""

    def __init__(self, llm: LLM) -> None:
        self.scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        self.stored: dict[int, int] = {}
        """Position of the row in each slot."""
        self._drafter: Any = proposer_of(llm)
        context = self._drafter.model.context
        self._store = store = context.store_fused

        def watch(z: Any, positions: Any, slots: Any) -> None:
            store(z, positions, slots)
            written = zip(slots[0].tolist(), positions.tolist(), strict=True)
            self.stored.update((slot, position) for slot, position in written if slot >= 0)

        context.store_fused = watch

    def stop(self) -> None:
        """Watch no longer."""
        self._drafter.model.context.store_fused = self._store

    def slots(self, request: Request) -> list[int]:
        """Of a running request, by position; as far as its blocks go."""
        manager = self.scheduler.kv_cache_manager
        (blocks,) = manager.get_block_ids(request.request_id)
        size = manager.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        return [block * size + offset for block in blocks for offset in range(size)]

    def missing(self) -> list[tuple[str, int]]:
        """Computed tokens of running requests whose row is neither stored nor waits."""
        waiting = self._waiting()
        return [
            (request.request_id, position)
            for request in self.scheduler.running
            for position, slot in enumerate(self.slots(request)[: request.num_computed_tokens])
            if waiting.get(slot, self.stored.get(slot)) != position
        ]

    def surplus(self) -> list[tuple[str, int]]:
        """Rows stored behind the computed tokens of running requests, if they own them alone."""
        return [
            (request.request_id, position)
            for request in self.scheduler.running
            for position, slot in enumerate(self.slots(request))
            if position >= request.num_computed_tokens and slot in self.stored
        ]

    def _waiting(self) -> dict[int, int]:
        backlog = getattr(self._drafter, "backlog", None)
        return {} if backlog is None else waiting_positions(backlog)


def waiting_positions(backlog: ContextBacklog) -> dict[int, int]:
    """Position of the row that waits for each slot; looks without touching anything."""
    positions = backlog._positions.clone()
    first = backlog._arrived_rows.start
    for _, arrived, _ in backlog._arrived:  # not in the ring yet
        positions[first : first + len(arrived)] = arrived
        first += len(arrived)
    slots = backlog.rows._slot_of
    return {int(slots[row]): int(positions[row]) for row in np.flatnonzero(slots >= 0)}
