"""On CPU, gated delta nets write wrong text after a draft shorter than K, or end the engine.

Delete this file when 0.32 is dropped (docs/engineering/upstream.md#short_draft_statespy).
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


def fix_short_draft_states() -> None:
    """Rebind the function in this process, a CPU worker."""
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
    """Run bonus tokens and drafts, T rows in all, through convolution and recurrence.

    Args:
        layer: the gated delta net layer.
        metadata: each request's rows, and how many rows of its last step it kept.
        qkv: projected rows, [T, C].
        b, a: gate inputs, [T, heads].
        histories: earlier rows that the convolution reads, by slot, [slots, C, history_length].
        states: states of the recurrence; each row of a draft has a slot for the state after it.
        width: width of the convolution.
        history_length: `width - 1` + K.

    Returns:
        The layer's output before its gate, [T, heads, head size].
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
