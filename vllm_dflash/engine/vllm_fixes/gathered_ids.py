"""Tensor-parallel ranks on CPUs can gather the ids of their candidates.

Wrong in vLLM 0.32.0, CPU: `LogitsProcessor.get_top_k_tokens` gathers the ids of all ranks, which
are 64-bit integers. Gathering through shared memory supports only floating-point numbers, so a
drafter with candidates fails with NotImplementedError. Not reported yet
(docs/engineering/upstream.md). Delete this file when `shm_all_gather` accepts integers.
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
