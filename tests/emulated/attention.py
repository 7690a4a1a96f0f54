"""vLLM's Triton attention as one launch of PyTorch's operators, only for speed.

In the interpreter, attention takes most of an engine's time. Unusual arguments still go to the
kernel.
"""

from __future__ import annotations

from typing import Any

import torch

from emulated import torch_cuda

UNUSUAL = ("alibi_slopes", "output_scale", "sinks", "mm_prefix_range", "rswa_prefix_lens")


def install() -> None:
    from vllm.v1.attention.backends import triton_attn
    from vllm.v1.kv_cache_interface import KVQuantMode

    kernel = triton_attn.unified_attention

    def is_unusual(a: dict[str, Any]) -> bool:
        return (
            isinstance(a["causal"], torch.Tensor)
            or (a["window_size"][0] >= 0 and not a["causal"])
            or bool(a["softcap"])
            or any(a[name] is not None for name in UNUSUAL)
            or a["chunk_lookback"] > -1
            or a["kv_quant_mode"] != KVQuantMode.NONE
            or a["q"].dtype != torch.float32
        )

    def unified_attention(**a: Any) -> None:
        if is_unusual(a):
            return kernel(**a)
        names = ("q", "k", "v", "out", "cu_seqlens_q", "seqused_k", "block_table")
        tensors = [a[name] for name in names]
        for t in tensors:
            assert t.is_cuda, "attention is given a tensor of the host's"
        device = torch_cuda.device()
        aliases = (device.weak_host_alias(t) for t in tensors)
        q, k, v, out, starts, lengths, table = aliases
        scale: float = a["softmax_scale"]
        window = 1 + a["window_size"][0] if a["causal"] else 0

        def later() -> None:
            with torch._C.DisableTorchFunction(), torch.inference_mode():
                attend(q, k, v, out, starts, lengths, table, scale, window, is_causal=a["causal"])

        read = [a[name] for name in names if name != "out"]
        return device.enqueue("attention", later, tensors, read, [a["out"]])

    triton_attn.unified_attention = unified_attention


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    table: torch.Tensor,
    scale: float,
    window: int,
    *,
    is_causal: bool,
) -> None:
    """Attend for R requests: q, out [N, heads, D]; k, v [pages, page, key heads, D];
    starts [R + 1].

    `window` 0: no window. A request's rows are its last positions.
    """
    page, group = k.shape[1], q.shape[1] // k.shape[2]
    begin = starts.tolist()
    for i, length in enumerate(lengths.tolist()):
        first, last = begin[i], min(begin[i + 1], len(q))
        rows = last - first
        if rows <= 0 or length <= 0:
            continue
        pages = table[i, : -(-length // page)].long()
        keys = k[pages].flatten(0, 1)[:length].repeat_interleave(group, 1)
        values = v[pages].flatten(0, 1)[:length].repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q[first:last], keys) * scale
        if is_causal:
            place = torch.arange(length - rows, length)[:, None]
            other = torch.arange(length)[None]
            hidden = other > place
            if window > 0:
                hidden |= place - other >= window
            scores.masked_fill_(hidden, float("-inf"))
        weights = scores.softmax(-1).nan_to_num_(0.0)
        out[first:last] = torch.einsum("hqk,khd->qhd", weights, values).view_as(out[first:last])
