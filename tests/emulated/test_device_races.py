"""Missing waits are found under any schedule; ordered operations are not reported."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl

from emulated import races, torch_cuda
from emulated.torch_cuda import Schedule

SCHEDULES = {
    "latest": lambda: torch_cuda.set_schedule(Schedule.LATEST),
    "at once": lambda: torch_cuda.set_schedule(Schedule.AT_ONCE),
    "main ahead": lambda: torch_cuda.set_schedule(Schedule.SOME_AHEAD, (0,)),
    "random": lambda: torch_cuda.set_schedule(Schedule.RANDOM, seed=3),
}


@triton.jit
def add_one(x, N: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, N)
    tl.store(x + i, tl.load(x + i) + 1)


def read_behind_a_write(x: torch.Tensor, side: torch.cuda.Stream, *, waits: bool) -> None:
    x.fill_(1)
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.to("cpu", non_blocking=True)


def write_behind_a_read(x: torch.Tensor, side: torch.cuda.Stream, *, waits: bool) -> None:
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.sum()
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    x.fill_(1)


def event_recorded_too_early(x: torch.Tensor, side: torch.cuda.Stream, *, waits: bool) -> None:
    event = torch.cuda.Event()
    event.record()
    x.fill_(1)
    if waits:
        event.record()
    side.wait_event(event)
    with torch.cuda.stream(side):
        x.sum()


def the_host_between(x: torch.Tensor, side: torch.cuda.Stream, *, waits: bool) -> None:
    x.fill_(1)
    if waits:
        torch.cuda.current_stream().synchronize()
    with torch.cuda.stream(side):
        x.sum()


def memory_freed_while_read(x: torch.Tensor, side: torch.cuda.Stream, *, waits: bool) -> None:
    y = x + 1
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y.sum()
    if waits:
        y.record_stream(side)
    del y


def pinned_memory_read_while_written(
    x: torch.Tensor, side: torch.cuda.Stream, *, waits: bool
) -> None:
    host = x.to("cpu", non_blocking=True)
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.zeros(8, device="cuda").copy_(host, non_blocking=True)


def kernels_of_triton(x: torch.Tensor, side: torch.cuda.Stream, *, waits: bool) -> None:
    add_one[(1,)](x, N=8)
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        add_one[(1,)](x, N=8)


def replayed(x: torch.Tensor, side: torch.cuda.Stream, *, waits: bool) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
    graph.replay()
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.sum()


CASES: list[Callable[..., None]] = [
    read_behind_a_write,
    write_behind_a_read,
    event_recorded_too_early,
    the_host_between,
    memory_freed_while_read,
    pinned_memory_read_while_written,
    kernels_of_triton,
    replayed,
]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", CASES)
def test_a_missing_wait_is_found_whatever_the_schedule(
    case: Callable[..., None], schedule: str
) -> None:
    x, side = torch.zeros(8, device="cuda"), torch.cuda.Stream()
    SCHEDULES[schedule]()
    with races.found() as missing:
        case(x, side, waits=False)
    assert missing
    with races.found() as ordered:
        case(x, side, waits=True)
    assert ordered == {}


def test_other_bytes_of_the_same_memory_are_nobodys_business() -> None:
    """Halves, rows, and every other value."""
    x, side = torch.zeros(8, 8, device="cuda"), torch.cuda.Stream()
    with races.found() as found:
        x[0].fill_(1)
        x[1:, ::2].fill_(1)
        with torch.cuda.stream(side):
            x[1:, 1::2].fill_(2)
    assert found == {}
    with races.found() as found:
        x[1:, ::2].fill_(1)
        with torch.cuda.stream(side):
            x[5:].sum()
    assert found
