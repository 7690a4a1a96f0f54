"""Where workers go: the parts that need no cluster."""

from __future__ import annotations

import pytest

from vllm_dflash.cluster.placement import bundles_of_workers, cpus_per_worker


@pytest.mark.parametrize(
    ("free", "workers", "expected"),
    [
        ([64, 64], 2, 64),  # a node each
        ([64], 2, 32),
        ([64, 8], 2, 32),  # rather two on the large node than one as slow as the small
        ([64, 40], 2, 40),
        ([64, 64, 10], 4, 32),
        ([3], 2, 1),
        ([1.5, 1], 2, 1),
        ([1], 2, 0),
        ([0.5, 0.5], 1, 0),
        ([], 1, 0),
    ],
)
def test_every_worker_gets_as_many_cpus(free: list[float], workers: int, expected: int) -> None:
    assert cpus_per_worker(free, workers) == expected


def test_workers_get_the_largest_bundles_of_a_group() -> None:
    serve = [{"CPU": 1.0}, {"CPU": 8.0}, {"GPU": 1.0}, {"CPU": 6.5}]
    assert bundles_of_workers(serve, 2) == [1, 3]
    assert bundles_of_workers([{"CPU": 2.0}] * 3, 2) == [0, 1]
    with pytest.raises(
        ValueError, match="has 3 bundles with a CPU, but tensor parallelism needs 4"
    ):
        bundles_of_workers(serve, 4)
