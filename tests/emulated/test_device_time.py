"""The device's own clock: it counts the work done, not the host's time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from emulated import torch_cuda

LAUNCH, REPLAYED, BYTE = 1.0, 0.25, 0.001


@pytest.fixture(autouse=True)
def _speed() -> Iterator[None]:
    torch.cuda.synchronize()
    torch_cuda.device().set_speed(LAUNCH, REPLAYED, BYTE)
    yield
    torch_cuda.device().set_speed(5e-6, 1e-6, 1e-12)


def worked() -> float:
    """Return the device's seconds for everything that is queued."""
    before = torch_cuda.DeviceTime.perf_counter()
    torch.cuda.synchronize()
    return torch_cuda.DeviceTime.perf_counter() - before


def test_nothing_takes_time_before_it_is_done() -> None:
    x = torch.zeros(100, device="cuda")
    torch.cuda.synchronize()
    before = torch_cuda.DeviceTime.perf_counter()
    x.add_(1.0)
    assert torch_cuda.DeviceTime.perf_counter() == before
    assert worked() == pytest.approx(LAUNCH + 800 * BYTE)  # read, and written
    assert worked() == 0.0


def test_launches_of_a_graph_take_less_and_their_bytes_as_long() -> None:
    x, stream = torch.zeros(100, device="cuda"), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        for _ in range(3):
            x.add_(1.0)
        graph.capture_end()
    torch.cuda.synchronize()
    assert worked() == 0.0  # nothing runs at a capture
    graph.replay()
    assert worked() == pytest.approx(3 * (REPLAYED + 800 * BYTE))
    assert x.tolist() == [3.0] * 100
