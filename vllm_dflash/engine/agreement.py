"""Agreement between tensor-parallel ranks: rank 0's values, and conditions true on all ranks.

Measured times differ between ranks, and confidences may be rounded differently. But all ranks must
run the same blocks and skip the same steps: a rank that plans while another skips waits forever.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from vllm.distributed.parallel_state import get_tp_group

Value = TypeVar("Value")


def from_rank_0(value: Value) -> Value:
    """Rank 0's `value`, on every rank. All ranks must call this."""
    group = get_tp_group()
    if group.world_size == 1:
        return value
    # The group's own broadcast would spin in shared memory for as long as rank 0 plans.
    values = [value]
    torch.distributed.broadcast_object_list(values, src=group.ranks[0], group=group.cpu_group)
    return values[0]


def agreed_by_all(holds: bool) -> bool:
    """Whether `holds` is True on every rank. All ranks must call this."""
    group = get_tp_group()
    if group.world_size == 1:
        return holds
    votes = torch.tensor([holds], dtype=torch.int32)
    torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return bool(votes)
