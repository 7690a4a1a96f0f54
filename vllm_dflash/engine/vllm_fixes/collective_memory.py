"""The memory through which tensor-parallel ranks on CPUs add up does not outlive them.

Wrong in vLLM 0.32.0, CPU: however its workers end, their segments in /dev/shm stay, 4 MiB for each
thread of a rank. Not reported yet (docs/engineering/upstream.md). Delete this file when vLLM
unlinks them once all ranks have mapped them.
"""

from __future__ import annotations

from pathlib import Path

from vllm.distributed.parallel_state import get_tp_group

SHARED_MEMORY = Path("/dev/shm")


def unlink_collective_memory() -> None:
    """Take the name off this rank's segment, which goes once no rank has it mapped any more.

    All ranks have mapped it when their group is there; so this is also for those that are killed.
    """
    collectives = getattr(get_tp_group().device_communicator, "dist_module", None)
    name = getattr(collectives, "group_name", None)
    if collectives is not None and name is not None:
        (SHARED_MEMORY / f"{name}_{collectives.communicator.rank}").unlink(missing_ok=True)
