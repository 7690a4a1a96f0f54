"""Which CPUs of a Ray cluster become workers."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

SECONDS_TO_RESERVE = 60.0
SECONDS_TO_BE_FREED = 10.0
"""How long CPUs that somebody holds are waited for: those of an engine that has just ended."""


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


def threads_of_workers(bundles: Sequence[Mapping[str, float]], workers: int) -> int:
    """OpenMP threads of every worker: the CPUs of the smallest of their bundles."""
    return math.floor(min(bundles[index]["CPU"] for index in bundles_of_workers(bundles, workers)))


def placed_bundles(placement_group: PlacementGroup, workers: int) -> list[tuple[int, str, str]]:
    """Index, node and address of each worker's bundle, by rank: those of this node first."""
    import ray
    from ray.util import placement_group_table

    chosen = bundles_of_workers(placement_group.bundle_specs, workers)
    nodes = placement_group_table(placement_group)["bundles_to_node_id"]
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    own = ray.get_runtime_context().get_node_id()
    placed = [(index, nodes[index], addresses[nodes[index]]) for index in chosen]
    return sorted(placed, key=lambda bundle: (bundle[1] != own, bundle[1]))


def describe_workers(placement_group: PlacementGroup, workers: int, threads: int) -> str:
    """Who computes where, for the log."""
    places = placed_bundles(placement_group, workers)
    where = ", ".join(f"{rank} on node {ip}" for rank, (_, _, ip) in enumerate(places))
    return f"Ray workers with {threads} threads each: {where}"


def reserve_cpus(workers: int) -> PlacementGroup:
    """Reserve CPUs for workers on the cluster this process is connected to, spread over its nodes.

    Raises:
        ValueError: there are too few free CPUs.
    """
    import ray
    from ray._private.state import available_resources_per_node

    def of(nodes: Iterable[Mapping[str, float]]) -> list[float]:
        return [float(node.get("CPU", 0)) for node in nodes]

    possible = cpus_per_worker(
        of(node["Resources"] for node in ray.nodes() if node["Alive"]), workers
    )
    deadline = time.monotonic() + SECONDS_TO_BE_FREED
    while True:
        free = of(available_resources_per_node().values())
        cpus = cpus_per_worker(free, workers)
        if cpus >= possible or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    if not cpus:
        raise ValueError(
            f"{workers} workers need a CPU each, but the Ray cluster's {len(free)} nodes have"
            f" {sum(free):g} free. `ray status` says what holds them; lower the tensor-parallel"
            " size, or add nodes."
        )
    group = ray.util.placement_group([{"CPU": cpus}] * workers, strategy="SPREAD")
    if not group.wait(SECONDS_TO_RESERVE):
        ray.util.remove_placement_group(group)
        raise ValueError(
            f"Ray could not reserve {workers} times {cpus} CPUs within {SECONDS_TO_RESERVE:g} s."
            " `ray status` says what holds them."
        )
    return group
