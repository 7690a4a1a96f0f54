"""Which cores the workers of a CPU engine compute on: `VLLM_CPU_OMP_THREADS_BIND`.

vLLM gives each rank a NUMA node of its own unless the variable says otherwise, and where there are
fewer nodes than ranks, its engine's process dies of a failed assertion. So that is checked before
any of them starts. Workers of our Ray executor share a node's cores by `share_of_cores`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"


@dataclass(frozen=True)
class Core:
    """A logical CPU. Those that share a physical core have the same `core`."""

    cpu: int
    core: int
    memory_node: int


def allowed_cores() -> list[Core]:
    """Those that this process may use."""
    from vllm.utils.cpu_resource_utils import get_allowed_cpu_list

    return [Core(cpu.id, cpu.physical_core, cpu.numa_node) for cpu in get_allowed_cpu_list()]


def share_of_cores(
    cores: Sequence[Core], binding: str, local_rank: int, local_workers: int
) -> list[int] | None:
    """The logical CPUs of a worker; None: wherever the system puts it.

    Args:
        cores: those that the worker's process may use.
        binding: value of the variable. "auto" deals out the physical cores of a node in equal
            parts, by memory node, a logical CPU of each; "nobind"; or lists such as
            "0-31|32-63", a part for each worker of a node.
        local_rank: of the worker, among
        local_workers: of this engine on its node.

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
                f" {local_workers} workers run on this node. Write a list for each, separated"
                " by '|', or leave it out."
            )
        return _parse(parts[local_rank])
    # One thread per core: two of them would share its arithmetic units.
    first = {
        (core.memory_node, core.core): core.cpu for core in sorted(cores, key=lambda c: -c.cpu)
    }
    ordered = [first[key] for key in sorted(first)]
    if len(ordered) < local_workers:
        return None
    start, end = (len(ordered) * rank // local_workers for rank in (local_rank, local_rank + 1))
    return sorted(ordered[start:end])


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
    from vllm.utils.cpu_resource_utils import get_visible_memory_node

    num_nodes = len(get_visible_memory_node())
    fault = binding_fault(envs.VLLM_CPU_OMP_THREADS_BIND, ranks, num_nodes, allowed_cores())
    if fault:
        raise ValueError(fault)


def binding_fault(binding: str, ranks: int, num_nodes: int, cores: Sequence[Core]) -> str | None:
    """Why so many ranks cannot be bound, and what to set instead; None where they can.

    Args:
        binding: value of the variable: `auto`, `nobind`, or cores of each rank.
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


def _parse(text: str) -> list[int]:
    cpus = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return sorted(cpus)


def _as_ranges(cpus: Sequence[int]) -> str:
    ranges: list[list[int]] = []
    for cpu in cpus:
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
