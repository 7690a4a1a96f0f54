"""Copies: which wait and which read late, by CUDA's "API synchronization behavior"."""

from __future__ import annotations

import pytest
import torch

from emulated import torch_cuda


def waits() -> dict[str, int]:
    return torch_cuda.device().waits()


def pinned(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).pin_memory()


def test_pinned_memory_is_read_when_the_device_gets_there() -> None:
    host, device = pinned(1, 1), torch.empty(2, device="cuda")
    device.copy_(host, non_blocking=True)
    host.fill_(5)  # too early
    assert device.tolist() == [5, 5]


def test_pageable_memory_is_read_at_once() -> None:
    """Through a staging buffer: the copy to the device is still late; the host does not wait."""
    host, device = torch.ones(2), torch.zeros(2, device="cuda")
    torch.cuda.synchronize()
    device.copy_(host, non_blocking=True)
    assert waits() == {}
    host.fill_(5)
    assert device.tolist() == [1, 1]


def test_a_blocking_copy_to_the_device_waits() -> None:
    host, device = pinned(1, 1), torch.empty(2, device="cuda")
    device.copy_(host)
    assert waits() == {"blocking copy to the device": 1}
    host.fill_(5)
    assert device.tolist() == [1, 1]


def test_what_is_on_its_way_to_pinned_memory_is_not_there_yet() -> None:
    device = torch.full((2,), 3.0, device="cuda")
    host = device.to("cpu", non_blocking=True)
    assert host.is_pinned()
    assert waits() == {}
    assert host.tolist() != [3, 3]
    torch.cuda.synchronize()
    assert host.tolist() == [3, 3]


def test_a_buffer_of_the_hosts_loses_what_it_held_when_a_copy_to_it_is_launched() -> None:
    """A read that comes too early must not find the right values of the last copy."""
    device, host = torch.full((2,), 3.0, device="cuda"), pinned(3, 3)
    host.copy_(device, non_blocking=True)
    assert host.tolist() != [3, 3]
    torch.cuda.synchronize()
    assert host.tolist() == [3, 3]


@pytest.mark.parametrize("non_blocking", [True, False])
def test_a_copy_to_pageable_memory_waits(non_blocking: bool) -> None:
    device, host = torch.full((2,), 3.0, device="cuda"), torch.zeros(2)
    host.copy_(device, non_blocking=non_blocking)
    assert host.tolist() == [3, 3]
    assert sum(waits().values()) == 1


def test_pinned_memory_lives_until_it_was_copied() -> None:
    """PyTorch's allocator of pinned memory records an event after each copy."""
    device = torch.empty(1000, device="cuda")
    device.copy_(torch.full((1000,), 3.0, pin_memory=True), non_blocking=True)
    taken = [torch.zeros(1000, pin_memory=True) for _ in range(8)]
    assert device.sum().item() == 3000
    assert len(taken) == 8


def test_the_devices_view_of_pinned_memory_is_read_late() -> None:
    """UVA makes no copy: the device reads and writes the host's memory."""
    host = torch.zeros(4, dtype=torch.int32, pin_memory=True)
    view = torch.ops._C.get_cuda_view_from_cpu_tensor(host)
    assert view.is_cuda
    found = view + 1
    host.fill_(5)
    assert found.tolist() == [6, 6, 6, 6]
    view[0] = 9
    torch.cuda.synchronize()
    assert host[0] == 9
