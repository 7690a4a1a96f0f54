"""Cores of a CPU engine's workers: `VLLM_CPU_OMP_THREADS_BIND`.

Unless the variable says otherwise, vLLM gives each rank its own NUMA node. With fewer nodes than
ranks, its engine process dies with a failed assertion, so we check that before anything starts.
Workers of our Ray executor share a node's cores by `share_of_cores`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import groupby
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


def check_thread_binding(ranks: int, engines: int = 1) -> None:
    """Refuse a binding that would stop vLLM's multiprocessing executor. Only checked on CPUs.

    Args:
        ranks: number of an engine's ranks on this machine.
        engines: number of engines here that share the variable's lists (data parallelism); each
            takes as many as it has ranks, one engine after the other.

    Raises:
        ValueError: `VLLM_CPU_OMP_THREADS_BIND` does not fit them; says what to set.
    """
    from vllm import envs
    from vllm.platforms import current_platform
    from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_visible_memory_node

    binding = envs.VLLM_CPU_OMP_THREADS_BIND
    if binding == "nobind" or ranks * engines == 1:
        return
    if not current_platform.is_cpu() or os.environ.get("VLLM_CPU_SIM_MULTI_NUMA", "0") != "0":
        return
    if binding == "auto":
        if ranks == 1:
            return
        nodes = len(get_visible_memory_node())
        found = f"vLLM binds each to its own NUMA node (this machine has {nodes})"
        fits = nodes >= ranks
    else:
        lists = binding.count("|") + 1
        found = f"{VARIABLE}={binding!r} has cores for {lists}"
        fits = lists >= ranks * engines
    if not fits:
        shares = divide_cores(get_allowed_cpu_list(), ranks * engines)
        asks = "tensor_parallel_size" + " and data_parallel_size" * (engines > 1)
        share_out = f"{VARIABLE}='{shares}' to divide its cores, or " if shares else ""
        raise ValueError(
            f"{asks} asks for {ranks * engines} ranks on this machine, but {found}. Set"
            f" {share_out}{VARIABLE}=nobind to leave threads unbound."
        )


def divide_cores(cores: Sequence[LogicalCPUInfo], ranks: int) -> str | None:
    """Logical CPUs of each rank, in vLLM's notation: `0-3|4-7`; None if there are too few cores.

    One logical CPU of each physical core, as in vLLM's own binding.
    """
    shares = [share_of_cores(cores, "auto", rank, ranks) for rank in range(ranks)]
    return "|".join(_as_ranges(share) for share in shares if share) if all(shares) else None


def _as_ranges(cpus: Sequence[int]) -> str:
    runs = groupby(enumerate(cpus), key=lambda numbered: numbered[1] - numbered[0])
    ranges = [[cpu for _, cpu in run] for _, run in runs]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in ranges)
