"""Cores of the workers of one node."""

from __future__ import annotations

import pytest
from vllm.platforms import current_platform
from vllm.utils import cpu_resource_utils
from vllm.utils.cpu_resource_utils import LogicalCPUInfo

from vllm_dflash.config.thread_binding import (
    VARIABLE,
    check_thread_binding,
    divide_cores,
    share_of_cores,
)

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


@pytest.mark.parametrize(
    ("cpus", "ranks", "divided"),
    [
        (range(8), 2, "0-3|4-7"),
        ((0, 1, 2, 5, 7), 2, "0-1|2,5,7"),
        ((0, 1), 2, "0|1"),
        ((0, 1), 3, None),
        ((), 1, None),
    ],
)
def test_cores_in_vllms_notation(cpus: range | tuple[int, ...], ranks: int, divided: str) -> None:
    assert divide_cores([LogicalCPUInfo(cpu, cpu, 0) for cpu in cpus], ranks) == divided


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU platform of one memory node with CORES."""
    monkeypatch.setattr(cpu_resource_utils, "get_allowed_cpu_list", lambda: CORES)
    monkeypatch.setattr(cpu_resource_utils, "get_visible_memory_node", lambda: [0])
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: True)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("VLLM_CPU_SIM_MULTI_NUMA", raising=False)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("binding", "ranks", "words"),
    [
        (None, 1, None),
        ("0-3", 1, None),
        ("nobind", 2, None),
        ("0|1", 2, None),
        ("0|1", 1, None),  # vLLM takes the first ones
        ("0-3", 2, "'0-3' has cores for 1"),
        ("0|1", 3, "'0|1' has cores for 2. Set VLLM_CPU_OMP_THREADS_BIND='0|1|2-3' to divide its"),
        (None, 2, "machine has 1). Set VLLM_CPU_OMP_THREADS_BIND='0-1|2-3' to divide"),
        (None, 5, "machine has 1). Set VLLM_CPU_OMP_THREADS_BIND=nobind to leave"),
    ],
)
def test_ranks_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, binding: str | None, ranks: int, words: str | None
) -> None:
    if binding is not None:
        monkeypatch.setenv(VARIABLE, binding)
    if words is None:
        check_thread_binding(ranks)
        return
    with pytest.raises(ValueError, match=f"for {ranks} ranks") as refused:
        check_thread_binding(ranks)
    assert words in str(refused.value)
    monkeypatch.setenv("VLLM_CPU_SIM_MULTI_NUMA", "0")
    with pytest.raises(ValueError, match=f"for {ranks} ranks"):
        check_thread_binding(ranks)
    # With vLLM's simulation of many nodes, and on other platforms, nothing is bound.
    monkeypatch.setenv("VLLM_CPU_SIM_MULTI_NUMA", "1")
    check_thread_binding(ranks)
    monkeypatch.delenv("VLLM_CPU_SIM_MULTI_NUMA")
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    check_thread_binding(ranks)


@pytest.mark.usefixtures("machine")
def test_engines_that_share_the_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes as many as it has ranks, one after the other."""
    monkeypatch.setenv(VARIABLE, "0|1|2|3")
    check_thread_binding(2, engines=2)
    check_thread_binding(1, engines=4)
    monkeypatch.setenv(VARIABLE, "0-3")
    with pytest.raises(ValueError, match=r"data_parallel_size asks for 2 ranks.*='0-1\|2-3'"):
        check_thread_binding(1, engines=2)
    monkeypatch.delenv(VARIABLE)
    check_thread_binding(1, engines=2)  # vLLM divides the cores itself


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("nodes", [2, 3])
def test_a_node_for_each_rank(monkeypatch: pytest.MonkeyPatch, nodes: int) -> None:
    monkeypatch.setattr(cpu_resource_utils, "get_visible_memory_node", lambda: [*range(nodes)])
    check_thread_binding(2)
