"""Tensors on `cuda:0`: computed late, with a CPU's results; what a GPU refuses is refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from emulated import torch_cuda


def pending() -> int:
    """Return the number of launches that were not waited for yet."""
    return sum(torch_cuda.device().pending().values())


def waits() -> dict[str, int]:
    return torch_cuda.device().waits()


def test_a_launch_returns_before_it_is_done() -> None:
    x = torch.arange(6, device="cuda").view(2, 3)
    y = x.float() * 2 + 1
    assert (y.shape, y.dtype, y.device) == ((2, 3), torch.float32, torch.device("cuda:0"))
    assert pending() >= 3
    assert waits() == {}
    assert y.tolist() == [[1, 3, 5], [7, 9, 11]]
    assert pending() == 0


def test_writes_into_views_are_seen_by_whoever_comes_behind() -> None:
    y = torch.zeros(2, 3, device="cuda")
    y[0] = 7
    y[:, 1].fill_(3)
    column = y.t()[2]
    column += 5
    assert y.tolist() == [[7, 3, 12], [0, 3, 5]]


OPERATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "matmul": lambda x: x @ x.t(),
    "softmax": lambda x: torch.softmax(x, -1),
    "argmax": lambda x: x.argmax(-1),
    "sort": lambda x: x.sort(dim=1, stable=True).values,
    "topk": lambda x: x.topk(2).indices,
    "cat": lambda x: torch.cat([x, x]),
    "where, with a scalar of the host's": lambda x: torch.where(x > 0, x, torch.tensor(0.5)),
    "index": lambda x: x[torch.arange(2, device=x.device).flip(0)],
    "index_put": lambda x: x.clone().index_fill_(0, torch.zeros(1, device=x.device).long(), 9.0),
    "cumsum": lambda x: x.cumsum(1),
    "an output that is sized": lambda x: torch.add(x, 1, out=torch.empty(0, device=x.device)),
    "in place": lambda x: x.clone().mul_(2).clamp_(min=0.1),
    "split": lambda x: x.split(2, dim=1)[1],
    "scatter_add": lambda x: torch.zeros_like(x).scatter_add_(0, torch.ones_like(x).long(), x),
    "a number of the host's": lambda x: x + 1,
    "a scalar tensor of the host's": lambda x: x + torch.tensor(1, dtype=torch.int64),
    "another type": lambda x: (x * 3).to(torch.int32),
    "complex views": lambda x: torch.view_as_real(torch.view_as_complex(x.view(2, 2, 2)) * 1j),
    "repeat_interleave of a known size": lambda x: torch.repeat_interleave(
        torch.arange(3, device=x.device).mul(2).sub(1).abs(), output_size=5
    ),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_compute_as_on_a_cpu_without_a_wait(name: str) -> None:
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
    on_device = x.to("cuda")
    torch_cuda.device().forget_counts()
    with torch.inference_mode():
        found = OPERATORS[name](on_device)
        assert waits() == {}
        assert not [one for one in torch_cuda.device().counts() if "no shape function" in one]
        expected = OPERATORS[name](x)
    assert found.is_cuda
    assert found.dtype == expected.dtype
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: torch.equal(x, x),
        lambda x: torch.repeat_interleave((x > 0).long().flatten()),
        lambda x: x[torch.tensor([1, 0])],  # host indices are copied to the device
    ],
    ids=["item", "bool", "nonzero", "mask", "tolist", "cpu", "equal", "repeats", "host indices"],
)
def test_what_the_host_wants_to_know_makes_it_wait(ask: Callable[[torch.Tensor], object]) -> None:
    x = torch.ones(2, 3, device="cuda")
    torch_cuda.device().forget_counts()
    ask(x)
    assert sum(waits().values()) >= 1


def test_waits_can_be_forbidden() -> None:
    """`torch.cuda.set_sync_debug_mode`, which vLLM's VLLM_GPU_SYNC_CHECK sets."""
    x = torch.ones(2, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
            x.sum().item()
        x.add_(1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert x.tolist() == [2, 2]


@pytest.mark.parametrize(
    ("mix", "words"),
    [
        (lambda x: x + torch.ones(2, 3), "same device"),
        (lambda x: torch.ones(2, 3).add_(x), "same device"),
        (lambda x: torch.cat([x, torch.ones(2, 3)]), "same device"),
        (lambda x: x.numpy(), "numpy"),
        (lambda x: np.asarray(x), "numpy"),
        (lambda x: torch.ones(5)[x.long()], "device"),
        (lambda x: torch.empty(2, device="cuda", pin_memory=True), "pinned"),
        (lambda x: x.pin_memory(), "pin"),
    ],
    ids=["add", "add in place", "cat", "numpy", "asarray", "index", "pinned device", "pin"],
)
def test_what_a_gpu_refuses_is_refused(mix: Callable[[torch.Tensor], object], words: str) -> None:
    x = torch.ones(2, 3, device="cuda")
    with pytest.raises((RuntimeError, TypeError), match=words):
        mix(x)


def test_a_failing_kernel_is_reported_where_the_host_waits() -> None:
    x = torch.zeros(3, device="cuda")
    found = x[torch.tensor([7], device="cuda")]  # out of bounds, not known yet
    assert found.shape == (1,)
    with pytest.raises(RuntimeError, match="asynchronously reported, of aten::index"):
        torch.cuda.synchronize()
    torch.cuda.synchronize()


def test_modules_live_on_it() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 4, device="cuda")
    x = torch.randn(2, 3)
    with torch.inference_mode():
        found = layer(x.to("cuda"))
    expected = torch.nn.functional.linear(x, layer.weight.cpu(), layer.bias.cpu())
    assert torch.allclose(found.cpu(), expected)


@pytest.mark.parametrize(("padding", "stride"), [(0, 1), (3, 1), (2, 2)])
def test_convolutions_of_each_channel_alone(padding: int, stride: int) -> None:
    """PyTorch has a kernel of its own for these on GPUs."""
    x, weight, bias = torch.randn(2, 6, 20), torch.randn(6, 1, 4), torch.randn(6)
    options = {"padding": padding, "stride": stride, "groups": 6}
    expected = torch.nn.functional.conv1d(x, weight, bias, **options)
    found = torch.nn.functional.conv1d(x.cuda(), weight.cuda(), bias.cuda(), **options)
    torch.testing.assert_close(found.cpu(), expected)
