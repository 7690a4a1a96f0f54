"""What all tensor-parallel ranks go by: decisions and times of rank 0, and what holds on all."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group

from vllm_dflash.planning import Bools, Ints
from vllm_dflash.planning.estimates import Estimates
from vllm_dflash.planning.step import Plan


def _from_rank_0(values: torch.Tensor) -> torch.Tensor:
    group = get_tp_group()
    if group.world_size > 1:
        torch.distributed.broadcast(values, src=group.ranks[0], group=group.cpu_group)
    return values


def agreed_seconds(seconds: float) -> float:
    """What rank 0 measured."""
    return float(_from_rank_0(torch.tensor([seconds], dtype=torch.float64)))


def agreed_estimates(read: Callable[[], Estimates | None]) -> Estimates | None:
    """What rank 0 reads. The others may be on machines that have no such file."""
    group = get_tp_group()
    return group.broadcast_object(read() if group.rank_in_group == 0 else None)


def agreed_by_all(holds: bool) -> bool:
    """Whether it holds on every rank."""
    group = get_tp_group()
    if group.world_size == 1:
        return holds
    votes = torch.tensor([holds], dtype=torch.int32)
    torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return bool(votes)


def agreed_plan(plan: Plan) -> Plan:
    """Rank 0's plan: measured times differ, but all ranks must run the same blocks and skip alike.

    A rank that plans while another skips waits for it for ever.
    """
    if get_tp_group().world_size == 1:
        return plan
    numbers = (plan.width, plan.skip_steps, plan.least, plan.price, plan.speedup)
    chosen = (*numbers, plan.is_probe, plan.uses_text, *plan.drafted.tolist())
    decision = _from_rank_0(torch.tensor(chosen, dtype=torch.float64)).tolist()
    width, skip_steps, least, price, speedup, is_probe, uses_text, *drafted = decision
    return Plan(
        drafted=np.array(drafted, dtype=bool),
        width=int(width),
        price=price,
        speedup=speedup,
        is_probe=bool(is_probe),
        least=int(least),
        skip_steps=int(skip_steps),
        uses_text=bool(uses_text),
    )


def agreed_lengths(lengths: Ints, from_text: Bools) -> tuple[Ints, Bools]:
    """How many drafts of each request rank 0 has verified, [R], and whose are what the text
    predicts: confidences may be rounded differently on another."""
    if get_tp_group().world_size == 1:
        return lengths, from_text
    agreed = _from_rank_0(torch.from_numpy(np.stack([lengths, from_text]).astype(np.int64))).numpy()
    return agreed[0], agreed[1].astype(bool)
