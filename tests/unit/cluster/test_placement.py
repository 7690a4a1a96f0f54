"""Where workers go: the parts that need no cluster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray._private import state
from vllm.utils.cpu_resource_utils import LogicalCPUInfo

from vllm_dflash.cluster.placement import (
    cpus_per_worker,
    largest_bundles,
    reserve_cpus,
    share_of_cores,
    worker_bundles,
)


@pytest.mark.parametrize(
    ("free", "workers", "expected"),
    [
        ([64, 64], 2, 64),  # a node each
        ([64], 2, 32),
        ([64, 8], 2, 32),  # better two on the large node than one on the small
        ([1.5, 1], 2, 1),
        ([1], 2, 0),
        ([], 1, 0),
    ],
)
def test_every_worker_gets_as_many_cpus(free: list[float], workers: int, expected: int) -> None:
    assert cpus_per_worker(free, workers) == expected


def test_workers_get_the_largest_bundles_of_a_group() -> None:
    """Bundles keep the group's order, whichever is the largest."""
    serve = [{"CPU": 1.0}, {"CPU": 6.5}, {"GPU": 1.0}, {"CPU": 8.0}]
    assert largest_bundles(serve, 2) == [1, 3]
    assert largest_bundles([{"CPU": 2.0}] * 3, 2) == [0, 1]
    assert largest_bundles([{"CPU": 4.0}, {"CPU": 1.0}, {"CPU": 8.0}], 2) == [0, 2]
    with pytest.raises(
        ValueError, match="has 3 bundles with a CPU, but tensor parallelism needs 4"
    ):
        largest_bundles(serve, 4)


def test_ranks_begin_on_the_engines_own_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's ranks follow each other; a bundle's index is not its rank."""
    nodes = dict(enumerate(["far", "own", "own", "near", "far", "own"]))
    table = {"bundles_to_node_id": nodes}
    listed = [{"NodeID": n, "NodeManagerAddress": f"at {n}"} for n in ("own", "near", "far")]
    monkeypatch.setattr(ray.util, "placement_group_table", lambda _: table)
    monkeypatch.setattr(ray, "nodes", lambda: listed)
    own = SimpleNamespace(get_node_id=lambda: "own")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: own)
    cpus = [8.0, 1.0, 8.0, 9.0, 8.0, 8.0]
    group: Any = SimpleNamespace(bundle_specs=[{"CPU": each} for each in cpus])
    placed = worker_bundles(group, 5)
    expected = [(2, "own"), (5, "own"), (0, "far"), (4, "far"), (3, "near")]
    assert placed == [(index, node, f"at {node}") for index, node in expected]
    nodes[2] = ""  # as Ray tells of a bundle that waits for CPUs
    with pytest.raises(ValueError, match=r"bundles \[2\] of the placement group have no node yet"):
        worker_bundles(group, 5)


@pytest.mark.parametrize(("sizes", "workers", "expected"), [((8, 3), 2, 4), ((8, 3), 3, 3)])
def test_of_unequal_nodes_workers_get_equal_shares(
    monkeypatch: pytest.MonkeyPatch,
    asked: list[Any],
    sizes: tuple[int, ...],
    workers: int,
    expected: int,
) -> None:
    nodes = [{"Alive": True, "Resources": {"CPU": float(size)}} for size in sizes]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    reserve_cpus(workers)
    assert asked == [[expected] * workers]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record CPUs asked for on two nodes of 8 each. At most 4 per worker can be reserved."""
    asked: list[Any] = []

    def placement_group(bundles: list[dict[str, int]], strategy: str) -> SimpleNamespace:
        asked.append([bundle["CPU"] for bundle in bundles])
        return SimpleNamespace(wait=lambda seconds: bundles[0]["CPU"] <= 4)

    nodes = [{"Alive": alive, "Resources": {"CPU": 8.0}} for alive in (True, True, False)]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray.util, "placement_group", placement_group)
    monkeypatch.setattr(ray.util, "remove_placement_group", lambda _: asked.append("given back"))
    return asked


def test_free_cpus_are_taken_if_others_stay_held(
    monkeypatch: pytest.MonkeyPatch, asked: list[Any]
) -> None:
    free = {"aa": {"CPU": 2.0}, "bb": {"CPU": 8.0}}
    monkeypatch.setattr(state, "available_resources_per_node", lambda: free)
    reserve_cpus(2)
    assert asked == [[8, 8], "given back", [4, 4]]


def test_too_few_cpus(monkeypatch: pytest.MonkeyPatch, asked: list[Any]) -> None:
    free = {"aa": {"CPU": 1.0}, "bb": {"memory": 1.0}}
    monkeypatch.setattr(state, "available_resources_per_node", lambda: free)
    with pytest.raises(ValueError, match=r"2 workers need a CPU each, .* 2 nodes have 1 free"):
        reserve_cpus(2)
    assert asked == [[8, 8], "given back"]


# Two sockets with two cores of two threads each, numbered as Linux does.
CORES = [LogicalCPUInfo(cpu, cpu % 4, cpu % 4 // 2) for cpu in range(8)]


@pytest.mark.parametrize(
    ("binding", "rank", "workers", "expected"),
    [
        ("auto", 0, 1, [0, 1, 2, 3]),
        ("auto", 0, 2, [0, 1]),  # a socket each
        ("auto", 1, 2, [2, 3]),
        ("auto", 0, 3, [0]),
        ("auto", 3, 4, [3]),
        ("auto", 1, 5, None),  # more workers than cores
        ("nobind", 1, 2, None),
        ("0-1,4|6,2", 0, 2, [0, 1, 4]),
        ("0-1,4|6,2", 1, 2, [2, 6]),
        ("3-5,4-6,10", 0, 1, [3, 4, 5, 6, 10]),
    ],
)
def test_share_of_cores(binding: str, rank: int, workers: int, expected: list[int] | None) -> None:
    assert share_of_cores(CORES, binding, rank, workers) == expected


def test_a_binding_with_too_few_parts_is_refused() -> None:
    with pytest.raises(ValueError, match="names cores for 1 workers, but 2 workers run"):
        share_of_cores(CORES, "0-3", 1, 2)


def test_cores_are_numbered_per_socket() -> None:
    """Each socket numbers its cores from 0; a share does not span two sockets unless it must."""
    cores = [LogicalCPUInfo(cpu, cpu % 2, 1 - cpu // 2) for cpu in range(4)]
    assert [share_of_cores(cores, "auto", rank, 2) for rank in (0, 1)] == [[2, 3], [0, 1]]
