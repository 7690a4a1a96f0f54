"""Triton kernels as launches on the device; places where the host waits."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from emulated import places, torch_cuda
from emulated.torch_cuda import CUDAGraph


@triton.jit
def add_one(x, y, n, N: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, N)
    tl.store(y + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)


def test_a_launch_of_triton_is_late_and_in_order() -> None:
    x, y = torch.arange(4, device="cuda"), torch.zeros(4, dtype=torch.int64, device="cuda")
    add_one[(1,)](x, y, 3, N=4)
    x.fill_(9)
    assert sum(torch_cuda.device().pending().values()) > 0
    assert y.tolist() == [1, 2, 3, 0]


def test_a_pointer_of_the_hosts_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        add_one[(1,)](torch.arange(4, device="cuda"), torch.zeros(4).long(), 4, N=4)


def test_a_launch_of_triton_is_captured() -> None:
    x, y = torch.arange(4, device="cuda"), torch.zeros(4, dtype=torch.int64, device="cuda")
    graph = CUDAGraph()
    with torch.cuda.graph(graph):  # type: ignore[arg-type]
        add_one[(1,)](x, y, 4, N=4)
    assert y.tolist() == [0, 0, 0, 0]
    x.fill_(9)
    graph.replay()
    assert y.tolist() == [10, 10, 10, 10]
    assert graph.names() == ["Triton kernel add_one"]


def test_places_where_the_host_waits_are_told() -> None:
    x = torch.ones(3, device="cuda")
    with places.of_waits() as found:
        x.sum().item()
        torch.cuda.synchronize()
    assert [place.split(" @ ")[0] for place in found] == ["wait item", "asked device.synchronize"]
    x.sum().item()
    assert sum(found.values()) == 2
