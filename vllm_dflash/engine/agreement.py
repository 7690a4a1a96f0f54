"""What all tensor-parallel ranks go by: decisions and times of rank 0, and what holds on all.

Measured times differ from rank to rank, and confidences may be rounded differently. But all must
run the same blocks and skip alike: a rank that plans while another skips waits for it for ever.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from vllm.distributed.parallel_state import get_tp_group

Value = TypeVar("Value")


def from_rank_0(value: Value) -> Value:
    """What rank 0 has in the place of this: to be called by all ranks alike."""
    group = get_tp_group()
    if group.world_size == 1:
        return value
    # Not the group's own, whose readers spin in shared memory for as long as rank 0 plans.
    values = [value]
    torch.distributed.broadcast_object_list(values, src=group.ranks[0], group=group.cpu_group)
    return values[0]


def agreed_by_all(holds: bool) -> bool:
    """Whether it holds on every rank."""
    group = get_tp_group()
    if group.world_size == 1:
        return holds
    votes = torch.tensor([holds], dtype=torch.int32)
    torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return bool(votes)
