"""What a GPU would get wrong raises, is counted, or gives rubbish; nothing of it goes unseen."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from emulated import torch_cuda

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _errors_end_with_their_test() -> Iterator[None]:
    yield
    torch.cuda.set_stream(torch.cuda.default_stream())
    torch.cuda.synchronize()


def test_a_copy_that_is_read_too_early_is_rubbish() -> None:
    host = torch.ones(4, device=CUDA).to("cpu", non_blocking=True)
    assert host.isnan().all()
    torch.cuda.synchronize()
    assert (host == 1.0).all()


def test_a_wait_that_was_not_asked_for_is_counted() -> None:
    torch.ones(4, device=CUDA).sum().item()
    assert torch_cuda.device().waits()["item"] > 0


def test_an_index_of_the_hosts_is_refused() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(4, device=CUDA).index_fill_(0, torch.tensor([0]), 2.0)


def test_pinned_memory_that_is_written_while_it_is_copied() -> None:
    """The indices are no longer valid when the device reads them."""
    pinned = torch.zeros(4, dtype=torch.int64, pin_memory=True)
    indices = pinned.to(CUDA, non_blocking=True)
    pinned.fill_(1 << 40)
    torch.ones(4, device=CUDA).index_select(0, indices)
    with pytest.raises(RuntimeError, match="asynchronously reported"):
        torch.cuda.synchronize()


def test_a_graph_whose_memory_was_freed_is_refused() -> None:
    graph, buffer = torch.cuda.CUDAGraph(), torch.zeros(4, device=CUDA)
    with torch.cuda.graph(graph):
        buffer.add_(1.0)
    buffer = torch.zeros(4, device=CUDA)
    with pytest.raises(RuntimeError, match="freed since it was captured"):
        graph.replay()


def test_a_question_within_a_capture_is_refused() -> None:
    asked = torch.zeros(4, device=CUDA)
    with pytest.raises(RuntimeError, match="captur"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        bool(asked.isinf().all())


def test_a_graph_keeps_numbers_of_the_host_as_they_were() -> None:
    graph, number, buffer = torch.cuda.CUDAGraph(), 1.0, torch.zeros(4, device=CUDA)
    with torch.cuda.graph(graph):
        buffer.fill_(number)
    assert (buffer == 0.0).all()  # nothing runs at capture
    number = 2.0
    graph.replay()
    assert (buffer == 1.0).all()
