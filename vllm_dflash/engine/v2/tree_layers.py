"""The target's attention layers where drafts may be trees: our kernel writes the rows of requests
with trees, vLLM's all others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

from vllm_dflash.engine.draft_trees import VerifiedTrees
from vllm_dflash.engine.v2.tree_kernel import Scores, TreeRows, attend_to_ancestors

BACKENDS = ("TRITON_ATTN", "FLASH_ATTN")
"""Whose cache is [blocks, K/V heads, block size, K and V of a token]."""


def can_attend(layer: Any) -> bool:
    """Whether rows of trees come out right in a layer of the target."""
    if type(layer) is not Attention or layer.attn_backend.get_name() not in BACKENDS:
        return False
    impl = layer.impl
    return (
        impl.attn_type == AttentionType.DECODER
        and impl.kv_sharing_target_layer_name is None
        and impl.alibi_slopes is None
        and layer.kv_cache_torch_dtype == layer.dtype  # not quantised
        and getattr(impl, "chunk_lookback", -1) == -1
    )


def scores_of(impl: TritonAttentionImpl) -> Scores:
    """How a layer's implementation weighs what it sees."""
    return Scores(
        impl.scale,
        window=impl.sliding_window[0] + 1,  # -1: none
        softcap=impl.logits_soft_cap or 0.0,
        sinks=impl.sinks,
    )


class TreeLayers:
    """Stands in front of `forward` of the target's attention layers."""

    def __init__(self, layers: Mapping[str, Attention], rows: TreeRows, budget: int) -> None:
        """`rows` are filled before a step with trees of up to `budget` nodes runs; the same tensors
        each time."""
        self.rows = rows
        self.most_rows = 1 + budget
        self.has_trees = self.are_all_trees = False
        """Whether any request of the step that runs has a tree, and whether all have."""
        self._layers = layers
        for layer in layers.values():
            layer.impl.forward = functools.partial(
                self._forward, layer.impl.forward, scores_of(layer.impl)
            )
        self._warm_up()

    def _forward(
        self,
        forward: Callable[..., torch.Tensor],
        scores: Scores,
        layer: Attention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *scales: torch.Tensor | None,
        **named_scales: torch.Tensor | None,
    ) -> torch.Tensor:
        is_recorded = query.is_cuda and torch.cuda.is_current_stream_capturing()
        is_recorded = is_recorded and attn_metadata is not None and attn_metadata.max_query_len > 1
        # A graph of drafts is for whatever comes: trees, chains, and prompts as short as they.
        everybody = is_recorded and attn_metadata.max_query_len <= self.most_rows
        if not (everybody or (self.are_all_trees and not is_recorded)):
            forward(
                layer, query, key, value, kv_cache, attn_metadata, output, *scales, **named_scales
            )
        if attn_metadata is not None and (is_recorded or self.has_trees):
            keys, values = kv_cache.transpose(1, 2).chunk(2, dim=-1)
            attend_to_ancestors(
                query,
                keys,
                values,
                output.view(query.shape),
                attn_metadata.block_table,
                attn_metadata.query_start_loc,
                attn_metadata.seq_lens,
                self.rows,
                scores,
                most_rows=self.most_rows,
                everybody=everybody,
            )
        return output

    def _warm_up(self) -> None:
        """Run the kernel on nothing, as each layer will: it is loaded then, which no graph that is
        being captured allows, and no request waits for it to be compiled."""
        device = self.rows.branches.device
        nothing = torch.zeros(2, dtype=torch.int32, device=device)
        for layer in self._layers.values():
            keys, values = layer.kv_cache.transpose(1, 2).chunk(2, dim=-1)
            query = keys.new_zeros(1, layer.impl.num_heads, layer.impl.head_size)
            for everybody in (False, True):
                attend_to_ancestors(
                    query,
                    keys,
                    values,
                    torch.empty_like(query),
                    nothing[None],
                    nothing,
                    nothing[:1],
                    self.rows,
                    scores_of(layer.impl),
                    most_rows=self.most_rows,
                    everybody=everybody,
                )

    def settle(
        self,
        step: VerifiedTrees,
        slot_mappings: Mapping[str, torch.Tensor],
        features: list[torch.Tensor],
    ) -> None:
        """Move what belongs to the accepted nodes to where their tokens belong.

        Args:
            step: its paths are known.
            slot_mappings: slot of each row in each layer, [T].
            features: hidden states of each row, [T, H] each.
        """
        rows, places = (torch.from_numpy(each) for each in step.accepted_rows())
        moved = rows != places
        if not moved.any():
            return
        device = self.rows.branches.device
        rows, places = rows[moved].to(device), places[moved].to(device)
        for name, layer in self._layers.items():
            slots = slot_mappings[name]
            cache = layer.kv_cache.transpose(1, 2)  # [blocks, block size, K/V heads, K and V]
            size = cache.shape[1]
            source, place = slots[rows], slots[places]
            cache[place // size, place % size] = cache[source // size, source % size]
        for feature in features:
            feature[places] = feature[rows]
