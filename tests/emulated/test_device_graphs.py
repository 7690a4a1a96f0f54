"""CUDA graphs: what a capture forbids, what a replay reads, and which memory a replay uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from emulated.torch_cuda import CUDAGraph


@pytest.fixture(autouse=True)
def _inference() -> None:
    torch.set_grad_enabled(False)


def captured(run: Callable[[], torch.Tensor], pool: Any = None) -> tuple[CUDAGraph, torch.Tensor]:
    graph = CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):  # type: ignore[arg-type]
        out = run()
    return graph, out


def test_nothing_runs_at_capture_and_a_replay_reads_what_is_there_by_then() -> None:
    x, kept = torch.zeros(3, device="cuda"), torch.zeros(3, device="cuda")

    def run() -> torch.Tensor:
        h = x * 2 + 1
        kept.copy_(h)
        return h[1:].sum()

    graph, total = captured(run)
    torch.cuda.synchronize()
    assert kept.tolist() == [0, 0, 0]
    for value in (1.0, 2.0):
        x.fill_(value)
        graph.replay()
        assert kept.tolist() == [2 * value + 1] * 3
        assert total.item() == 2 * (2 * value + 1)


@pytest.mark.parametrize(
    "forbidden",
    [
        lambda x, event: x.sum().item(),
        lambda x, event: bool((x > 0).any()),
        lambda x, event: x.cpu(),
        lambda x, event: x.nonzero(),
        lambda x, event: x.copy_(torch.ones(3)),
        lambda x, event: x.copy_(torch.ones(3), non_blocking=True),
        lambda x, event: x.copy_(torch.ones(3).pin_memory()),
        lambda x, event: torch.zeros(3).copy_(x, non_blocking=True),
        lambda x, event: torch.cuda.synchronize(),
        lambda x, event: torch.cuda.current_stream().synchronize(),
        lambda x, event: event.synchronize(),
        lambda x, event: event.query(),
    ],
    ids=[
        "item",
        "bool",
        "cpu",
        "nonzero",
        "pageable copy",
        "pageable copy, non-blocking",
        "blocking copy",
        "copy to pageable memory",
        "synchronize",
        "stream.synchronize",
        "event.synchronize",
        "event.query",
    ],
)
def test_a_capture_does_not_survive(
    forbidden: Callable[[torch.Tensor, torch.cuda.Event], object],
) -> None:
    x, event = torch.ones(3, device="cuda"), torch.cuda.Event()
    event.record()
    with pytest.raises(RuntimeError, match="captur"):
        captured(lambda: forbidden(x, event))  # type: ignore[arg-type, return-value]
    assert not torch.cuda.is_current_stream_capturing()
    assert captured(lambda: x + 1)[1].shape == (3,)


def test_a_replay_refuses_memory_that_was_freed() -> None:
    """A real GPU would use whatever that memory holds by then."""
    holder = [torch.ones(3, device="cuda")]
    graph, out = captured(lambda: holder[0] + 1)
    graph.replay()
    assert out.tolist() == [2, 2, 2]
    holder.clear()
    with pytest.raises(RuntimeError, match="freed since it was captured"):
        graph.replay()


def test_graphs_of_one_pool_overwrite_what_nobody_holds() -> None:
    """This is why vLLM copies a graph's output before it replays another graph."""
    x, pool = torch.ones(1000, device="cuda"), torch.cuda.graph_pool_handle()
    first, out = captured(lambda: x + 1, pool)
    weak = torch.ops._C.weak_ref_tensor(out)
    del out
    second, _ = captured(lambda: x + 6, pool)
    first.replay()
    assert weak[0].item() == 2
    second.replay()
    assert weak[0].item() == 7


def test_graphs_of_one_pool_leave_what_is_held() -> None:
    x, pool = torch.ones(1000, device="cuda"), torch.cuda.graph_pool_handle()
    first, held = captured(lambda: x + 1, pool)
    second, _ = captured(lambda: x + 6, pool)
    first.replay()
    second.replay()
    assert held[0].item() == 2
