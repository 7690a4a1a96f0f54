"""Shared memory for collectives of tensor-parallel ranks on CPUs is freed when the ranks end.

Wrong in vLLM 0.32.0, CPU: however workers end, their segments in /dev/shm remain, 4 MiB for each
thread of a rank. Not reported yet (docs/engineering/upstream.md). Delete this file when vLLM
unlinks the segments once all ranks have mapped them.
"""

from __future__ import annotations

from pathlib import Path

from vllm.distributed.parallel_state import get_tp_group

SHARED_MEMORY = Path("/dev/shm")


def unlink_collective_memory() -> None:
    """Unlink this rank's segment, so that it is freed once no rank has it mapped.

    All ranks have mapped it once their group exists, so this also covers ranks that are killed.
    """
    collectives = getattr(get_tp_group().device_communicator, "dist_module", None)
    name = getattr(collectives, "group_name", None)
    if collectives is not None and name is not None:
        (SHARED_MEMORY / f"{name}_{collectives.communicator.rank}").unlink(missing_ok=True)
