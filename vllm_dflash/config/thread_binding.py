"""Cores of our Ray executor's workers: `VLLM_CPU_OMP_THREADS_BIND`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.utils.cpu_resource_utils import LogicalCPUInfo

VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"


def share_of_cores(
    cores: Sequence[LogicalCPUInfo], binding: str, local_rank: int, local_workers: int
) -> list[int] | None:
    """Logical CPUs of a worker; None if it is not bound.

    Args:
        cores: cores that the worker's process may use, as vLLM finds them.
        binding: value of the variable. "auto" divides the node's physical cores equally, ordered by
            memory node, with one logical CPU of each; "nobind"; or lists such as "0-31|32-63", one
            part for each worker on a node.
        local_rank: the worker's rank among the `local_workers`.
        local_workers: number of this engine's workers on the node.

    Raises:
        ValueError: the lists have too few parts, or something is not a number.
    """
    if binding == "nobind":
        return None
    if binding != "auto":
        parts = binding.split("|")
        if local_rank >= len(parts):
            raise ValueError(
                f"{VARIABLE}={binding!r} names cores for {len(parts)} workers, but"
                f" {local_workers} workers run on this node. Write one list for each worker,"
                f" separated by '|', or unset {VARIABLE}."
            )
        from vllm.utils.cpu_resource_utils import parse_id_list

        return parse_id_list(parts[local_rank])
    # One thread per core: two threads would share its arithmetic units.
    first = {
        (cpu.numa_node, cpu.physical_core): cpu.id for cpu in sorted(cores, key=lambda c: -c.id)
    }
    ordered = [first[key] for key in sorted(first)]
    if len(ordered) < local_workers:
        return None
    start, end = (len(ordered) * rank // local_workers for rank in (local_rank, local_rank + 1))
    return sorted(ordered[start:end])
