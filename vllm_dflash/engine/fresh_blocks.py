"""Cache blocks of the drafter's layers that change hands in a step."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from vllm.v1.core.sched.output import SchedulerOutput


class KnownRequest(Protocol):
    """What a runner knows of a request that has ended."""

    block_ids: tuple[list[int], ...]
    num_tokens: int


def fresh_blocks(step: SchedulerOutput, group: int, block_size: int) -> list[int]:
    """Blocks of a cache group that this step allocates; none that a prefix was found in.

    Args:
        step: what the scheduler hands to the workers.
        group: of the cache.
        block_size: tokens per block of this group.
    """
    fresh: list[int] = []
    for request in step.scheduled_new_reqs:
        fresh += request.block_ids[group][-(-request.num_computed_tokens // block_size) :]
    going_on = step.scheduled_cached_reqs
    for name, blocks, computed in zip(
        going_on.req_ids, going_on.new_block_ids, going_on.num_computed_tokens, strict=True
    ):
        if blocks is not None:  # of a preempted request that resumes all, else what is added
            found = -(-computed // block_size) if name in going_on.resumed_req_ids else 0
            fresh += blocks[group][found:]
    return fresh


def useless_blocks(
    ended: Collection[KnownRequest], group: int, block_size: int, *, caches_prefixes: bool
) -> list[int]:
    """Blocks of requests that have ended in which no later request can find a prefix.

    A block can be found if it was filled; the last token of a request never was computed.
    """
    useless: list[int] = []
    for request in ended:
        filled = (request.num_tokens - 1) // block_size if caches_prefixes else 0
        useless += request.block_ids[group][filled:]
    return useless
