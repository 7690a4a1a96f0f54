"""Tensor-parallel ranks on CPUs tell each other the ids of their candidates.

Wrong in vLLM 0.32.0, CPU: `LogitsProcessor.get_top_k_tokens` gathers ids of all ranks, integers of
64 bits, and the gathering through shared memory knows floating-point numbers only, so a drafter
with candidates ends with NotImplementedError. Not reported yet (docs/engineering/upstream.md).
Delete this file when `shm_all_gather` takes them.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group


def mend_gathered_ids() -> None:
    """Have them go as pairs of float32, of which nothing is computed."""
    collectives: Any = getattr(get_tp_group().device_communicator, "dist_module", None)
    if not hasattr(collectives, "handle"):  # one rank, or torch's own gathering
        return
    gather = collectives.all_gather_into_tensor

    def all_gather_into_tensor(
        output: torch.Tensor, given: torch.Tensor, group: Any = None
    ) -> None:
        if given.dtype == torch.int64:
            output, given = output.view(torch.float32), given.contiguous().view(torch.float32)
        gather(output, given, group)

    collectives.all_gather_into_tensor = all_gather_into_tensor
