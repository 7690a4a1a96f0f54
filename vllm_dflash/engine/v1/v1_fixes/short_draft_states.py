"""The convolutions of a gated delta net find their history after a short draft, on CPU.

Wrong in vLLM 0.32.0, CPU, whatever the speculative method: `_spec_forward` puts a step's rows into
the last columns of their request's history, and the next step counts from the first one. Only where
a draft has all K tokens is that the same place. After a shorter one text is wrong, and one that is
shorter than what was accepted before it ends the engine. 0.33.0 mends it
(docs/engineering/upstream.md). Delete this file when 0.32 is dropped.
"""

from __future__ import annotations

from functools import wraps
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from vllm import _custom_ops as ops
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

_of_whole_drafts = gdn_attention._spec_forward


def mend_short_draft_states() -> None:
    """In a CPU worker: rebind the function in this process."""
    gdn_attention._spec_forward = forward_drafts


@wraps(_of_whole_drafts, assigned=())
def forward_drafts(
    layer: Any,
    metadata: GDNAttentionMetadata,
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    histories: torch.Tensor,
    states: torch.Tensor,
    width: int,
    history_length: int,
) -> torch.Tensor:
    """Bonus tokens and drafts of D requests, T rows in all, through convolution and recurrence.

    Args:
        layer: whose weights it is.
        metadata: which rows are whose, and how many of its last rows each request kept.
        qkv: of the rows, [T, C].
        b, a: of the gates, [T, heads].
        histories: rows that the convolution looks back at, by slot, [slots, C, history_length].
        states: of the recurrence, after each row of a draft in a slot of its own.
        width: of the convolution.
        history_length: `width - 1` and K.

    Returns:
        The layer's output before its gate, [T, heads, D].
    """
    count = metadata.num_spec_decodes
    starts = metadata.spec_query_start_loc[: count + 1].to(torch.int32)
    if bool((starts.diff() == history_length - width + 2).all()):
        return _of_whole_drafts(
            layer, metadata, qkv, b, a, histories, states, width, history_length
        )
    slots = metadata.spec_state_indices_tensor[:count].to(torch.int32).contiguous()
    kept = metadata.num_accepted_tokens[:count].to(torch.int32).contiguous()
    weight = gdn_attention._unpacked_conv_weight(layer).unsqueeze(1)
    mixed = torch.empty_like(qkv)
    for (start, end), slot, first in zip(
        pairwise(starts.tolist()), slots[:, 0].tolist(), (kept - 1).tolist(), strict=True
    ):
        if start == end:
            continue
        history = histories[slot]
        rows = torch.cat([history[:, first : first + width - 1], qkv[start:end].T], dim=1)
        mixed[start:end] = F.conv1d(rows, weight, layer.conv1d.bias, groups=len(rows)).T
        history[:, : rows.shape[1] - 1] = rows[:, 1:]
    if layer.activation == "silu":
        F.silu(mixed, inplace=True)
    query, key, value = (part.squeeze(0) for part in layer.rearrange_mixed_qkv(mixed))
    return ops.fused_sigmoid_gating_delta_rule_update_spec_cpu(
        A_log=layer.A_log,
        dt_bias=layer.dt_bias,
        q=query,
        k=key,
        v=value,
        a=a,
        b=b,
        initial_state_source=states,
        spec_state_indices=slots,
        num_accepted_tokens=kept,
        cu_seqlens=starts.contiguous(),
        use_qk_l2norm_in_kernel=True,
    )
