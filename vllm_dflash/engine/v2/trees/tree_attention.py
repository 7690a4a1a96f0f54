"""Attention of a target's layers to draft trees: which backends support it, and how it works.

vLLM's layers call `impl.forward` with the batch's metadata, which are on the device.
`TreeAttention` replaces it. In steps that verify drafts, it computes

- context and bonus token: with `tree_context.py`. vLLM's kernels would not do: in layers with a
  window, a node's position depends on its depth, theirs on its row; and TRITON_ATTN's reads the
  whole context serially for such rows, and returns no sums.
- nodes: with `tree_nodes.py`, which continues from there and applies sinks, once.

If a batch has prompts, with too many rows for these kernels, vLLM's forward runs for all requests,
and the rows of trees are then written again.

A chain is a tree to these kernels, so steps with and without trees share graphs: a CUDA graph
replays what `forward` called when it was captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionType
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from vllm_dflash.engine.v2.trees.tree_context import attend_to_context
from vllm_dflash.engine.v2.trees.tree_kernels import MOST_ROWS, Scores
from vllm_dflash.engine.v2.trees.tree_nodes import attend_to_nodes
from vllm_dflash.engine.v2.trees.tree_slots import TreeSlots

BACKENDS = ("FLASH_ATTN", "TRITON_ATTN")
"""Backends whose caches hold a head's keys and values side by side."""


def attention_unsupported_reason(layers: Mapping[str, AttentionLayerBase]) -> str | None:
    """Reason why this target gets chains; None if its attention layers can attend to trees.

    `layers`: the target's attention layers by name, after loading.
    """
    for name, layer in layers.items():
        backend, impl = layer.get_attn_backend().get_name(), getattr(layer, "impl", None)
        if backend not in BACKENDS or impl is None:
            return f"{backend} cannot attend to trees"
        obstacles = {
            "its cache is quantised": is_quantized_kv_cache(impl.kv_cache_dtype),
            "it has ALiBi": impl.alibi_slopes is not None,
            "it attends to an encoder": impl.attn_type != AttentionType.DECODER,
            "it attends in chunks": getattr(impl, "chunk_lookback", -1) > -1,
        }
        for obstacle, is_there in obstacles.items():
            if is_there:
                return f"{obstacle} ({name})"
    return None


def attend_to_trees(layers: Iterable[AttentionLayerBase], trees: TreeSlots) -> None:
    """Replace `forward` of layers that can attend to trees; `trees`: persistent tensors."""
    for layer in layers:
        impl: Any = getattr(layer, "impl", None)
        impl.forward = TreeAttention(impl, trees)


class TreeAttention:
    """Replaces `forward` of a layer's implementation."""

    def __init__(self, impl: Any, trees: TreeSlots) -> None:
        self.plain: Callable[..., torch.Tensor] = impl.forward
        self.trees = trees
        window = 1 + impl.sliding_window[0]  # vLLM counts the keys before a row; -1: all
        self.scores = Scores(impl.scale, window, float(impl.logits_soft_cap), impl.sinks)

    def __call__(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *scales: Any,
        **more_scales: Any,
    ) -> torch.Tensor:
        """vLLM's arguments: rows [T, H, D] with padding, and the cache, which has their K and V."""
        has_trees = attn_metadata is not None and attn_metadata.max_query_len > 1
        all_requests = has_trees and _are_short(attn_metadata)
        if not all_requests:
            self.plain(
                layer, query, key, value, kv_cache, attn_metadata, output, *scales, **more_scales
            )
        if not has_trees:
            return output
        count = attn_metadata.num_actual_tokens
        rows, written = query[:count], output[:count]
        batch = attn_metadata, self.trees, self.scores
        context = attend_to_context(rows, kv_cache, *batch, all_requests=all_requests)
        attend_to_nodes(rows, kv_cache, context, written, *batch, all_requests=all_requests)
        return output


def _are_short(metadata: Any) -> bool:
    """Whether each request has at most `MOST_ROWS` rows, none of which sees later ones, as rows of
    images in a prompt may."""
    ranges = ("mm_prefix_range_tensor", "mm_prefix_query_range_tensor")
    sees_ahead = any(getattr(metadata, name, None) is not None for name in ranges)
    return metadata.max_query_len <= MOST_ROWS and not sees_ahead
