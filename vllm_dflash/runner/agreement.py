"""What all tensor-parallel ranks go by: decisions and times of rank 0."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from vllm.distributed import get_tp_group

from vllm_dflash.planning.planner import Plan


def _from_rank_0(values: torch.Tensor) -> torch.Tensor:
    group = get_tp_group()
    if group.world_size > 1:
        torch.distributed.broadcast(values, src=group.ranks[0], group=group.cpu_group)
    return values


def agreed_seconds(seconds: float) -> float:
    """What rank 0 measured."""
    return float(_from_rank_0(torch.tensor([seconds], dtype=torch.float64)))


def agreed_plan(plan: Plan) -> Plan:
    """Whom to draft and how wide: measured times differ, but all ranks must run the same block."""
    if get_tp_group().world_size == 1:
        return plan
    decision = torch.tensor([plan.width, *plan.drafted.tolist()], dtype=torch.int32)
    width, *drafted = _from_rank_0(decision).tolist()
    return replace(plan, width=width, drafted=np.array(drafted, dtype=bool))
