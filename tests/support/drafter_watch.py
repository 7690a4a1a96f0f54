"""Watch where an engine's drafts go and what they are chosen from, on either model runner."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from vllm import LLM

from support.engines import USES_V2, proposer_of, scheduler_of
from vllm_dflash.planning import Ints


@dataclass
class Draft:
    """One block of one request."""

    request: str
    written: set[int]
    """Cache blocks that its keys and values go to."""
    own: set[int]
    """Cache blocks that its request has."""


@contextmanager
def watch_drafts(llm: LLM) -> Iterator[list[Draft]]:
    """Note every draft of every request; check that no two of a step go to one block."""
    seen: list[Draft] = []
    drafter = proposer_of(llm)
    manager = scheduler_of(llm).kv_cache_manager
    block_size = manager.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size

    def note(requests: list[str], slots: list[Ints]) -> None:
        taken: set[int] = set()
        for name, own_slots in zip(requests, slots, strict=True):
            written = {int(slot) // block_size for slot in own_slots if slot >= 0}
            assert not written & taken
            taken |= written
            seen.append(Draft(name, written, set(manager.get_block_ids(name)[0])))

    def draft_v1(inputs: Any, block_table: Any, newest: Any) -> Any:
        ends = inputs.query_start_loc
        slots = [inputs.slots[a:b] for a, b in itertools.pairwise(ends)]
        note([drafter.record.ids[row] for row in inputs.requests], slots)
        return original(inputs, block_table, newest)

    def draft_v2(num_reqs: int, *more: Any, **named: Any) -> None:
        group = drafter.draft_kv_cache_group_id
        slots = drafter.block_tables.slot_mappings[group, : num_reqs * drafter.num_query_per_req]
        owners = drafter.sample_idx_mapping.view(-1, drafter.num_speculative_steps)[:num_reqs, 0]
        names = [drafter.req_states.index_to_req_id[int(owner)] for owner in owners]
        note(names, list(slots.view(num_reqs, -1).cpu().numpy()))
        original(num_reqs, *more, **named)

    owner, name = (drafter, "_generate_draft") if USES_V2 else (drafter.block, "draft")
    original = getattr(owner, name)
    setattr(owner, name, draft_v2 if USES_V2 else draft_v1)
    try:
        yield seen
    finally:
        delattr(owner, name)


@contextmanager
def watch_logits(llm: LLM) -> Iterator[list[torch.Tensor]]:
    """Collect the logits of each block that is drafted, [drafts, V'] each, as they come."""
    model = proposer_of(llm).model
    compute: Callable[[torch.Tensor], torch.Tensor] = model.compute_logits
    logits: list[torch.Tensor] = []

    def keep(hidden: torch.Tensor) -> torch.Tensor:
        logits.append(compute(hidden))
        return logits[-1]

    model.compute_logits = keep
    try:
        yield logits
    finally:
        model.compute_logits = compute
