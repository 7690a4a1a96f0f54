"""CUDA graphs: what a capture forbids, what is baked in, and which memory a replay uses."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from emulated import torch_cuda
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


def test_a_replay_is_a_launch() -> None:
    x = torch.zeros(3, device="cuda")
    graph, out = captured(lambda: x + 1)
    torch.cuda.synchronize()
    graph.replay()
    x.fill_(9)  # after the replay
    assert sum(torch_cuda.device().pending().values()) >= 2
    assert out.tolist() == [1, 1, 1]


def test_numbers_of_the_host_are_baked_in() -> None:
    x, scale = torch.ones(3, device="cuda"), 3
    graph, out = captured(lambda: x * scale)
    scale = 5
    graph.replay()
    assert out.tolist() == [3, 3, 3]


def test_a_tensor_that_is_replaced_is_not_seen() -> None:
    holder = {"x": torch.ones(3, device="cuda")}
    kept = holder["x"]
    graph, out = captured(lambda: holder["x"] + 1)
    holder["x"] = torch.full((3,), 7.0, device="cuda")
    graph.replay()
    assert out.tolist() == [2, 2, 2]
    assert kept.tolist() == [1, 1, 1]


def test_pinned_memory_is_read_at_each_replay() -> None:
    host, x = torch.zeros(2, pin_memory=True), torch.zeros(2, device="cuda")

    def run() -> torch.Tensor:
        x.copy_(host, non_blocking=True)
        return x + 1

    graph, out = captured(run)
    host.fill_(4)
    graph.replay()
    assert out.tolist() == [5, 5]


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


def test_a_capture_that_goes_on_after_such_a_call_fails_at_its_end() -> None:
    x = torch.ones(3, device="cuda")

    def run() -> torch.Tensor:
        with pytest.raises(RuntimeError):
            x.sum().item()
        return x + 1

    with pytest.raises(RuntimeError, match="previous error during capture"):
        captured(run)


def test_a_capture_that_fails_lets_go_of_what_it_held() -> None:
    x = torch.ones(3, device="cuda")

    def run() -> torch.Tensor:
        y = x + 1
        torch_cuda.device().enqueue("one that holds it", lambda: y, [y])
        return x.sum().item()  # type: ignore[return-value]

    used = torch.cuda.memory_allocated()
    with pytest.raises(RuntimeError, match="captur"):
        captured(run)
    gc.collect()
    assert torch.cuda.memory_allocated() == used


def test_the_default_stream_cannot_be_captured() -> None:
    with pytest.raises(RuntimeError, match="non-default stream"):
        torch.cuda.CUDAGraph().capture_begin()


def test_other_streams_must_join() -> None:
    x, side = torch.ones(3, device="cuda"), torch.cuda.Stream()

    def run(*, joins: bool) -> torch.Tensor:
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            y = x + 10
        if joins:
            current.wait_stream(side)
        return y + 1 if joins else x

    graph, out = captured(lambda: run(joins=True))
    graph.replay()
    assert out.tolist() == [12, 12, 12]
    with pytest.raises(RuntimeError, match="unjoined"):
        captured(lambda: run(joins=False))


def test_a_capture_does_not_wait_for_what_is_outside() -> None:
    x, event = torch.ones(3, device="cuda"), torch.cuda.Event()
    event.record()

    def run() -> torch.Tensor:
        torch.cuda.current_stream().wait_event(event)
        return x + 1

    with pytest.raises(RuntimeError, match="isolation"):
        captured(run)


def test_a_replay_refuses_memory_that_was_freed() -> None:
    """A real GPU would use whatever that memory holds by then."""
    holder = [torch.ones(3, device="cuda")]
    graph, out = captured(lambda: holder[0] + 1)
    graph.replay()
    assert out.tolist() == [2, 2, 2]
    holder.clear()
    with pytest.raises(RuntimeError, match="freed since it was captured"):
        graph.replay()


def test_a_graph_keeps_its_own_memory() -> None:
    x = torch.ones(1000, device="cuda")
    graph, out = captured(lambda: (x + 1) * 2 - 1)
    torch.cuda.empty_cache()
    others = [torch.zeros(1000, device="cuda") for _ in range(8)]
    graph.replay()
    assert (out == 3).all()
    assert not any(other.any() for other in others)


def test_memory_is_given_out_again_within_a_capture() -> None:
    x, places = torch.ones(1000, device="cuda"), []

    def run() -> torch.Tensor:
        y = x + 1
        places.append(y.data_ptr())
        total = y.sum()
        del y
        z = x * 5
        places.append(z.data_ptr())
        return total + z[0]

    graph, out = captured(run)
    assert places[0] == places[1]
    graph.replay()
    assert out.item() == 2005


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


def test_a_graph_knows_what_was_captured() -> None:
    x = torch.ones(3, device="cuda")
    graph, _ = captured(lambda: x + 1)
    assert graph.names() == ["aten::add"]


def test_a_graph_that_was_not_captured_cannot_be_replayed() -> None:
    with pytest.raises(RuntimeError, match="preceding successful capture"):
        torch.cuda.CUDAGraph().replay()
