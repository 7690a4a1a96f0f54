"""Which cores vLLM binds the ranks of a CPU engine to, checked before any of them starts.

vLLM gives each rank a NUMA node of its own unless `VLLM_CPU_OMP_THREADS_BIND` says otherwise, and
where there are fewer nodes than ranks, its engine's process dies of a failed assertion.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"


def check_thread_binding(ranks: int) -> None:
    """Refuse what would stop vLLM's multiprocessing executor here; other platforms have no say.

    Args:
        ranks: those of this machine.

    Raises:
        ValueError: `VLLM_CPU_OMP_THREADS_BIND` does not fit them; says what to set.
    """
    if ranks == 1:
        return
    from vllm import envs
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or os.environ.get("VLLM_CPU_SIM_MULTI_NUMA", "0") != "0":
        return
    from vllm.utils import cpu_resource_utils

    fault = binding_fault(
        envs.VLLM_CPU_OMP_THREADS_BIND,
        ranks,
        len(cpu_resource_utils.get_visible_memory_node()),
        sorted(core.id for core in cpu_resource_utils.get_allowed_cpu_list()),
    )
    if fault:
        raise ValueError(fault)


def binding_fault(binding: str, ranks: int, num_nodes: int, cores: Sequence[int]) -> str | None:
    """Why so many ranks cannot be bound, and what to set instead; None where they can.

    Args:
        binding: value of `VLLM_CPU_OMP_THREADS_BIND`: `auto`, `nobind`, or cores of each rank.
        ranks: those of this machine.
        num_nodes: its NUMA nodes.
        cores: ids of those this process may use, ascending.
    """
    if binding == "nobind":
        return None
    if binding == "auto":
        if num_nodes >= ranks:
            return None
        found = f"vLLM binds each to a NUMA node of its own, and here are {num_nodes}"
    else:
        lists = binding.count("|") + 1
        if lists == ranks:
            return None
        found = f"{VARIABLE}={binding!r} has cores for {lists}"
    return (
        f"tensor_parallel_size asks for {ranks} ranks on this machine, but {found}. Set"
        f" {VARIABLE}='{divide_cores(cores, ranks)}' to share its cores out, or"
        f" {VARIABLE}=nobind to leave threads unbound."
    )


def divide_cores(cores: Sequence[int], ranks: int) -> str:
    """Cores of each rank, in vLLM's notation: `0-3|4-7`. Where they are too few, ranks share."""
    parts = []
    for rank in range(ranks):
        first = rank * len(cores) // ranks
        last = max((rank + 1) * len(cores) // ranks, first + 1)
        parts.append(_as_ranges(cores[first:last]))
    return "|".join(parts)


def _as_ranges(cores: Sequence[int]) -> str:
    ranges: list[list[int]] = []
    for core in cores:
        if ranges and core == ranges[-1][1] + 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
