"""Cores of the workers of one node."""

from __future__ import annotations

import pytest
from vllm.utils.cpu_resource_utils import LogicalCPUInfo

from vllm_dflash.config.thread_binding import share_of_cores

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


def test_a_core_is_known_by_its_node_as_well() -> None:
    """Each socket numbers its cores from 0; a share does not span two sockets unless it must."""
    cores = [
        LogicalCPUInfo(0, 0, 1),
        LogicalCPUInfo(1, 1, 1),
        LogicalCPUInfo(2, 0, 0),
        LogicalCPUInfo(3, 1, 0),
    ]
    assert [share_of_cores(cores, "auto", rank, 2) for rank in (0, 1)] == [[2, 3], [0, 1]]
