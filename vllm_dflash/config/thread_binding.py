"""Which cores vLLM binds the ranks of a CPU engine to, checked before any of them starts.

vLLM gives each rank a NUMA node of its own unless `VLLM_CPU_OMP_THREADS_BIND` says otherwise, and
where there are fewer nodes than ranks, its engine's process dies of a failed assertion.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from vllm_dflash.cluster.cores import Core, share_of_cores

VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"


def check_thread_binding(ranks: int) -> None:
    """Refuse what would stop vLLM's multiprocessing executor here; other platforms have no say.

    Args:
        ranks: those of this machine.

    Raises:
        ValueError: `VLLM_CPU_OMP_THREADS_BIND` does not fit them; says what to set.
    """
    if ranks == 1 and "|" not in os.environ.get(VARIABLE, ""):
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
        [
            Core(cpu.id, cpu.physical_core, cpu.numa_node)
            for cpu in cpu_resource_utils.get_allowed_cpu_list()
        ],
    )
    if fault:
        raise ValueError(fault)


def binding_fault(binding: str, ranks: int, num_nodes: int, cores: Sequence[Core]) -> str | None:
    """Why so many ranks cannot be bound, and what to set instead; None where they can.

    Args:
        binding: value of `VLLM_CPU_OMP_THREADS_BIND`: `auto`, `nobind`, or cores of each rank.
        ranks: those of this machine.
        num_nodes: its NUMA nodes.
        cores: those this process may use.
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
    shares = divide_cores(cores, ranks)
    share_out = f"{VARIABLE}='{shares}' to share its cores out, or " if shares else ""
    return (
        f"tensor_parallel_size asks for {ranks} ranks on this machine, but {found}. Set"
        f" {share_out}{VARIABLE}=nobind to leave threads unbound."
    )


def divide_cores(cores: Sequence[Core], ranks: int) -> str | None:
    """Logical CPUs of each rank, in vLLM's notation: `0-3|4-7`; None where cores are too few.

    One of each physical core, as vLLM takes where it binds by itself.
    """
    shares = [share_of_cores(cores, "auto", rank, ranks) for rank in range(ranks)]
    return "|".join(_as_ranges(share) for share in shares if share) if all(shares) else None


def _as_ranges(cpus: Sequence[int]) -> str:
    ranges: list[list[int]] = []
    for cpu in cpus:
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
