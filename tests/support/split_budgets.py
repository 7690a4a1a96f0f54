"""Budgets of drafts split among requests on a device, beside a sort in plain Python."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from support.kernel_oracle import Oracle
from vllm_dflash.engine.v2.budget_split import split
from vllm_dflash.planning import Floats
from vllm_dflash.planning.objective import worth_of

BONUS, UNTOUCHED = 1, 99


@dataclass
class Case:
    """Requests with at most K drafts."""

    num_requests: int
    width: int


def compare(
    case: Case, *, device: torch.device | str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ends of logits and rows, found and expected."""
    random = np.random.default_rng(case.num_requests)
    count, width = case.num_requests, case.width
    num_slots = count + 3
    chances = random.random((num_slots, width)).astype(np.float32)
    slots = random.permutation(num_slots)[:count]
    drafts, others = random.integers(0, width + 1, count), random.integers(1, 4, count)
    survival: Floats = chances[slots].astype(np.float64).cumprod(axis=1)
    found, expected = [], []
    for fair, part in product((False, True), (0.0, 0.5, 1.0)):
        worth = worth_of(survival, fair)
        order = sorted(
            (-worth[request, place], request, place)
            for request in range(count)
            for place in range(drafts[request])
        )
        budget = int(part * len(order))
        ends = torch.full((2, num_slots + 1), UNTOUCHED, dtype=torch.int32, device=device)
        rows = torch.from_numpy(np.stack((drafts, others)).astype(np.int32)).to(device)
        there = torch.from_numpy(chances).to(device), torch.from_numpy(slots).to(device)
        split(*there, rows, budget, BONUS, *ends, fair=fair)
        found.append(ends[:, : count + 1].flatten().cpu())
        admitted = np.bincount([request for _, request, _ in order[:budget]], minlength=count)
        for kept in (admitted + BONUS, admitted + others):
            expected.append(torch.from_numpy(np.cumsum([0, *kept])))
    return torch.cat(found), torch.cat(expected).int()


BUDGETS = Oracle(
    "budgets",
    {"5 requests": Case(5, 7), "64 requests": Case(64, 15), "600 requests": Case(600, 15)},
    compare,
    dtypes=(torch.int32,),
    interpreted=("5 requests",),
)
