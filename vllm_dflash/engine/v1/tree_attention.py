"""Attention over draft trees with vLLM's own kernel for CPUs, one path at a time.

A node sees the context and its ancestors, and the kernel sees whatever stands in the slots before a
row. So for each path of a tree the K/V of its nodes are written into the first slots behind the
bonus token, and the kernel runs for the rows that are new in it. Windows, soft caps, sinks and
quantised caches are right by themselves: a path stands there as a chain would. Takes one more call
of the kernel for each path beyond the first, and no more for a chain.

Of three ways to do it (a kernel with masks of its own; paths as sequences that share the context's
blocks; this one) the first would have to know how each instruction set packs the keys of the cache,
and the second needs cache blocks that the scheduler has not given.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadata

from vllm_dflash.engine.v1.draft_trees import VerifiedTrees
from vllm_dflash.engine.v1.tree_layout import PathRows


def can_attend(layer: Any) -> bool:
    """Whether rows of trees come out right in a layer of the target."""
    return (
        type(layer) is Attention  # others have metadata of their own
        and type(layer.impl) is CPUAttentionBackendImpl
        and layer.impl.attn_type == AttentionType.DECODER
        and layer.impl.kv_sharing_target_layer_name is None
    )


class NodeCache(NamedTuple):
    """K/V of all nodes of a step in one layer."""

    layer: Attention
    kv_cache: torch.Tensor
    slots: torch.Tensor
    """Of all rows of the step."""
    key: torch.Tensor
    """[N, heads, head size]."""
    value: torch.Tensor


class TreeAttention:
    """Stands in front of `forward` of the target's attention layers."""

    def __init__(self, layers: Iterable[Attention]) -> None:
        self._step: VerifiedTrees | None = None
        self._metadata: dict[tuple[int, int], CPUAttentionMetadata] = {}
        self._nodes: list[NodeCache] = []
        for layer in layers:
            layer.impl.forward = functools.partial(self._forward, layer.impl.forward)

    def begin(self, step: VerifiedTrees | None) -> None:
        """What the next forward pass has of trees."""
        self._step = step
        self._metadata.clear()
        self._nodes.clear()

    def settle(self) -> None:
        """Move K/V of the accepted nodes to where their tokens belong, before anybody reads it."""
        assert self._step is not None
        rows, places = self._step.accepted_rows()
        kept = torch.from_numpy(np.searchsorted(self._step.node_rows, rows))
        into = torch.from_numpy(places)
        for layer, kv_cache, slots, key, value in self._nodes:
            layer.impl.do_kv_cache_update(layer, key[kept], value[kept], kv_cache, slots[into])
        self.begin(None)

    def _forward(
        self,
        forward: Callable[..., torch.Tensor],
        layer: Attention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        *scales: torch.Tensor | None,
        **named_scales: torch.Tensor | None,
    ) -> torch.Tensor:
        forward(layer, query, key, value, kv_cache, attn_metadata, output, *scales, **named_scales)
        if attn_metadata is None or self._step is None:
            return output
        slots = attn_metadata.slot_mapping
        for number, turn in enumerate(self._step.turns):
            written = torch.from_numpy(turn.written_rows)
            into = slots[torch.from_numpy(turn.slot_rows)]
            layer.impl.do_kv_cache_update(layer, key[written], value[written], kv_cache, into)
            rows = torch.from_numpy(turn.query_rows)
            asked = query[rows]
            metadata = self._metadata_of(number, turn, attn_metadata, layer, query.dtype)
            output[rows] = forward(
                layer, asked, key, value, kv_cache, metadata, torch.empty_like(asked)
            )
        nodes = torch.from_numpy(self._step.node_rows)
        self._nodes.append(NodeCache(layer, kv_cache, slots, key[nodes], value[nodes]))
        return output

    def _metadata_of(
        self,
        number: int,
        turn: PathRows,
        batch: CPUAttentionMetadata,
        layer: Attention,
        dtype: torch.dtype,
    ) -> CPUAttentionMetadata:
        """Of one path of each request, made once for all layers that share the batch's."""
        found = self._metadata.get((id(batch), number))
        if found is not None:
            return found
        query_start_loc = torch.from_numpy(turn.query_start_loc)
        seq_lens = torch.from_numpy(turn.seq_lens)
        scheduled = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(turn.requests),
            num_heads=layer.impl.num_heads,
            num_kv_heads=layer.impl.num_kv_heads,
            head_dim=layer.impl.head_size,
            seq_lens=seq_lens,
            dtype=dtype,
            query_start_loc=query_start_loc,
            causal=True,
            sliding_window_size=-1,  # layers with and without a window may share this
            isa=layer.isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
            kv_cache_dtype=layer.impl.kv_cache_dtype,
        )
        made = self._metadata[id(batch), number] = dataclasses.replace(
            batch,
            num_actual_tokens=len(turn.query_rows),
            max_query_len=int(np.diff(turn.query_start_loc).max()),
            query_start_loc=query_start_loc,
            max_seq_len=int(turn.seq_lens.max()),
            seq_lens=seq_lens,
            block_table=batch.block_table[torch.from_numpy(turn.requests)],
            scheduler_metadata=scheduled,
            causal=True,
            dynamic_causal=None,
        )
        return made
