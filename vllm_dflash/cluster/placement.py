"""Which CPUs of a Ray cluster become workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

SECONDS_TO_RESERVE = 60.0
SECONDS_TO_BE_FREED = 10.0
"""How long CPUs that somebody holds are waited for: those of an engine that has just ended."""

Place = tuple[int, str, str]
"""A worker's bundle: index, node and address, as vLLM has them."""


def cpus_per_worker(free: Sequence[float], workers: int) -> int:
    """The most CPUs that every worker can have, if none spans two nodes; 0: there are too few.

    A tensor-parallel step takes as long as its slowest worker, so all get the same.

    Args:
        free: CPUs of each node.
        workers: how many are to be placed, several to a node where that gives them more.
    """
    shares = {int(cpus // count) for cpus in free for count in range(1, workers + 1)} - {0}
    fitting = (n for n in shares if sum(int(cpus // n) for cpus in free) >= workers)
    return max(fitting, default=0)


def bundles_of_workers(bundles: Sequence[Mapping[str, float]], workers: int) -> list[int]:
    """Indices of the bundles that workers get: those with the most CPUs, in their order.

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


def placed_bundles(placement_group: PlacementGroup, workers: int) -> list[Place]:
    """Where workers go, by rank: to this node first."""
    import ray
    from ray.util import placement_group_table

    chosen = bundles_of_workers(placement_group.bundle_specs, workers)
    nodes = placement_group_table(placement_group)["bundles_to_node_id"]
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    own = ray.get_runtime_context().get_node_id()
    placed = [(index, nodes[index], addresses[nodes[index]]) for index in chosen]
    return sorted(placed, key=lambda bundle: (bundle[1] != own, bundle[1]))


def reserve_cpus(workers: int) -> PlacementGroup:
    """Reserve CPUs for workers on the cluster this process is connected to, spread over its nodes.

    As many as idle nodes would have; where those are not to be had, of what is free.

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
        f" {sum(node.get('CPU', 0) for node in nodes):g} free. `ray status` says what holds them;"
        " lower the tensor-parallel size, or add nodes."
    )
