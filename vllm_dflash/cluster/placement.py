"""Places workers on the CPUs of a Ray cluster, and on the cores of its nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup
    from vllm.utils.cpu_resource_utils import LogicalCPUInfo

BINDING = "VLLM_CPU_OMP_THREADS_BIND"
"""Environment variable that binds workers to cores."""
SECONDS_TO_RESERVE = 60.0
SECONDS_TO_BE_FREED = 10.0
"""How long to wait for CPUs that are still held, such as by an engine that has just exited."""

WorkerBundle = tuple[int, str, str]
"""A worker's bundle: its index, node id and node address, in vLLM's format."""


def cpus_per_worker(free: Sequence[float], workers: int) -> int:
    """Return the most CPUs that every worker can have if none spans two nodes; 0: too few CPUs.

    All workers get the same number, since a tensor-parallel step is as slow as its slowest worker.

    `free`: CPUs per node. Workers share a node if that gives each of them more CPUs.
    """
    shares = {int(cpus // count) for cpus in free for count in range(1, workers + 1)} - {0}
    fitting = (n for n in shares if sum(int(cpus // n) for cpus in free) >= workers)
    return max(fitting, default=0)


def largest_bundles(bundles: Sequence[Mapping[str, float]], workers: int) -> list[int]:
    """Return the indices of the `workers` bundles with the most CPUs, ascending.

    Raises:
        ValueError: fewer bundles than workers have a CPU.
    """
    with_cpu = [index for index, bundle in enumerate(bundles) if bundle.get("CPU", 0) >= 1]
    if len(with_cpu) < workers:
        raise ValueError(
            f"the placement group has {len(with_cpu)} bundles with a CPU, but tensor parallelism"
            f' needs {workers}. Give it {workers} bundles like {{"CPU": 8}}.'
        )
    largest = sorted(with_cpu, key=lambda index: -bundles[index]["CPU"])[:workers]
    return sorted(largest)


def worker_bundles(placement_group: PlacementGroup, workers: int) -> list[WorkerBundle]:
    """Return each worker's bundle, by rank; those on this node come first.

    Raises:
        ValueError: the group has too few bundles with a CPU, or is still pending.
    """
    import ray
    from ray.util import placement_group_table

    chosen = largest_bundles(placement_group.bundle_specs, workers)
    nodes = placement_group_table(placement_group)["bundles_to_node_id"]
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    if pending := [index for index in chosen if nodes[index] not in addresses]:
        raise ValueError(
            f"bundles {pending} of the placement group have no node yet: wait for it with"
            " ray.get(placement_group.ready()) before the engine starts."
        )
    own = ray.get_runtime_context().get_node_id()
    found = [(index, nodes[index], addresses[nodes[index]]) for index in chosen]
    return sorted(found, key=lambda bundle: (bundle[1] != own, bundle[1]))


def reserve_cpus(workers: int) -> PlacementGroup:
    """Reserve CPUs for workers on the connected Ray cluster, spread over its nodes.

    First tries to share all CPUs of each node; if those cannot be reserved, those that are free.

    Raises:
        ValueError: there are too few free CPUs.
    """
    import ray
    from ray._private.state import available_resources_per_node

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for patience in (SECONDS_TO_BE_FREED, SECONDS_TO_RESERVE):
        cpus = cpus_per_worker([float(node.get("CPU", 0)) for node in nodes], workers)
        if cpus:
            group = ray.util.placement_group([{"CPU": cpus}] * workers, strategy="SPREAD")
            if group.wait(patience):
                return group
            ray.util.remove_placement_group(group)
        nodes = list(available_resources_per_node().values())
    raise ValueError(
        f"{workers} workers need a CPU each, but the Ray cluster's {len(nodes)} nodes have"
        f" {sum(node.get('CPU', 0) for node in nodes):g} free. `ray status` shows what uses"
        " them. Lower the tensor-parallel size, or add nodes."
    )


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
                f"{BINDING}={binding!r} names cores for {len(parts)} workers, but"
                f" {local_workers} workers run on this node. Write one list for each worker,"
                f" separated by '|', or unset {BINDING}."
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
