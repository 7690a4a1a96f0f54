"""Triton kernels, and vLLM's operators, as launches on the device."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from emulated import places, torch_cuda
from emulated.attention import attend
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


def test_norms_as_vllms_cuda_kernels_compute_them() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 2, 8), torch.randn(8)
    expected = torch.nn.functional.rms_norm(x, (8,), weight, 1e-6)
    out = torch.empty(3, 2, 8, device="cuda")
    # Not contiguous, like the heads of a projection.
    wide = torch.cat([x, x], -1).to("cuda")[..., :8]
    torch.ops._C.rms_norm(out, wide, weight.to("cuda"), 1e-6)
    assert torch.allclose(out.cpu(), expected, atol=1e-6)
    residual = torch.randn(3, 2, 8)
    both = [x.to("cuda"), residual.to("cuda")]
    torch.ops._C.fused_add_rms_norm(*both, weight.to("cuda"), 1e-6)
    assert torch.equal(both[1].cpu(), x + residual)
    assert torch.allclose(
        both[0].cpu(), torch.nn.functional.rms_norm(x + residual, (8,), weight, 1e-6), atol=1e-6
    )


@pytest.mark.parametrize(("window", "is_causal"), [(0, True), (4, True), (0, False)])
def test_fast_attention_is_vllms_kernel(window: int, is_causal: bool) -> None:
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    torch.manual_seed(0)
    page, heads, key_heads, size = 16, 4, 2, 16
    rows, lengths = [3, 1, 5], [7, 20, 37]
    starts = torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()], dtype=torch.int32)
    q = torch.randn(sum(rows), heads, size)
    k, v = torch.randn(2, 8, page, key_heads, size)
    table = torch.tensor([[1, 0, 0], [2, 3, 0], [4, 5, 7]], dtype=torch.int32)
    seen = torch.tensor(lengths, dtype=torch.int32)
    expected = torch.zeros_like(q)
    arguments = (q, k, v, expected, starts, seen, table, 0.25, window)
    attend(*arguments, is_causal=is_causal)
    out = torch.zeros_like(q).to("cuda")
    moved = [one.to("cuda") for one in (q, k, v)]
    unified_attention(
        *moved,
        out,
        cu_seqlens_q=starts.to("cuda"),
        max_seqlen_q=max(rows),
        seqused_k=seen.to("cuda"),
        max_seqlen_k=max(lengths),
        softmax_scale=0.25,
        causal=is_causal,
        window_size=(window - 1, 0) if window else (-1, -1),
        block_table=table.to("cuda"),
        softcap=0.0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
    )
    assert torch.allclose(out.cpu(), expected, atol=1e-5)


def test_places_where_the_host_waits_are_told() -> None:
    x = torch.ones(3, device="cuda")
    with places.of_waits() as found:
        x.sum().item()
        torch.cuda.synchronize()
    assert [place.split(" @ ")[0] for place in found] == ["wait item", "asked device.synchronize"]
    x.sum().item()
    assert sum(found.values()) == 2
