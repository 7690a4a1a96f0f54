"""Tensor-parallel ranks on CPUs cannot gather the ids of their candidates.

Delete this file when `shm_all_gather` accepts integers
(docs/engineering/upstream.md#gathered_idspy).
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group


def fix_gathered_ids() -> None:
    """Gather int64 tensors as pairs of float32, which are only copied."""
    collectives: Any = getattr(get_tp_group().device_communicator, "dist_module", None)
    if not hasattr(collectives, "handle"):  # one rank, or gathering by torch itself
        return
    gather = collectives.all_gather_into_tensor

    def all_gather_into_tensor(
        output: torch.Tensor, given: torch.Tensor, group: Any = None
    ) -> None:
        if given.dtype == torch.int64:
            output, given = output.view(torch.float32), given.contiguous().view(torch.float32)
        gather(output, given, group)

    collectives.all_gather_into_tensor = all_gather_into_tensor
