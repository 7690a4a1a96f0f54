"""Cores of the workers of one node."""

from __future__ import annotations

import pytest

from vllm_dflash.config.thread_binding import Core, share_of_cores

# Two sockets of two cores of two threads, numbered as Linux does.
CORES = [Core(cpu, cpu % 4, cpu % 4 // 2) for cpu in range(8)]


@pytest.mark.parametrize(
    ("binding", "rank", "workers", "expected"),
    [
        ("auto", 0, 1, [0, 1, 2, 3]),
        ("auto", 0, 2, [0, 1]),  # a socket each
        ("auto", 1, 2, [2, 3]),
        ("auto", 0, 3, [0]),
        ("auto", 2, 3, [2, 3]),
        ("auto", 1, 5, None),  # more workers than cores
        ("nobind", 1, 2, None),
        ("0-1,4|6,2", 0, 2, [0, 1, 4]),
        ("0-1,4|6,2", 1, 2, [2, 6]),
    ],
)
def test_share_of_cores(binding: str, rank: int, workers: int, expected: list[int] | None) -> None:
    assert share_of_cores(CORES, binding, rank, workers) == expected


def test_a_binding_with_too_few_parts_is_refused() -> None:
    with pytest.raises(ValueError, match="names cores for 1 workers, but 2 workers run"):
        share_of_cores(CORES, "0-3", 1, 2)
