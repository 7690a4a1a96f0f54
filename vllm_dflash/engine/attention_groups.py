"""Attention metadata for the drafter's layers, separate for each kind of layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.utils import AttentionGroup

from vllm_dflash.model.layers import BlockAttention


@dataclass
class DraftAttentionGroup(AttentionGroup):
    """Layers with the same cache group, window and causality.

    In vLLM a cache group is either causal or not, and its metadata is scheduled for one window.
    """

    causal: bool = False

    def build_metadata(self, common: CommonAttentionMetadata, *args: Any, **kwargs: Any) -> Any:
        """Metadata for a step."""
        return super().build_metadata(replace(common, causal=self.causal), *args, **kwargs)

    def build_metadata_for_cudagraph_capture(
        self, common: CommonAttentionMetadata, *args: Any
    ) -> Any:
        """Metadata for capturing a graph."""
        return super().build_metadata_for_cudagraph_capture(
            replace(common, causal=self.causal), *args
        )


def split_by_kind(
    cache_group: AttentionGroup,
    attentions: Sequence[BlockAttention],
    vllm_config: VllmConfig,
    device: torch.device,
    kernel_block_size: int | None,
) -> list[DraftAttentionGroup]:
    """Split a cache group of drafter layers by kind, each kind with its own metadata builder.

    The drafter's cache may have another dtype than the target's, which is the one in the config.
    """
    vllm_config = _with_cache_type(vllm_config, attentions[0].attn.kv_cache_dtype)
    layers_by_kind: dict[tuple[int | None, bool], list[str]] = defaultdict(list)
    for attention in attentions:
        if attention.attn.layer_name in cache_group.layer_names:
            layers_by_kind[attention.window, attention.causal].append(attention.attn.layer_name)
    groups, cache = [], (cache_group.kv_cache_spec, cache_group.kv_cache_group_id)
    for (window, causal), layer_names in layers_by_kind.items():
        group = DraftAttentionGroup(cache_group.backend, layer_names, *cache, causal=causal)
        group.create_metadata_builders(vllm_config, device, kernel_block_size)
        builder = group.get_metadata_builder()
        if window is not None and getattr(builder, "aot_schedule", False):
            # FlashAttention would schedule for the cache's window, and our cache keeps everything.
            builder.aot_schedule = False
        _share_workspace(cache_group, group)
        groups.append(group)
    return groups


def split_by_window(
    groups: list[AttentionGroup],
    attentions: Sequence[BlockAttention],
    vllm_config: VllmConfig,
    device: torch.device,
) -> None:
    """Split the model runner's groups, in place, if their builders accept only one window.

    The runner makes metadata for the drafter's layers, too, and groups layers with equal caches.
    The drafter's caches are equal whatever the window, and FlashInfer refuses mixed windows.
    """
    window_of = {each.attn.layer_name: each.window for each in attentions}
    found = list(groups)
    groups.clear()
    for group in found:
        kinds: dict[tuple[bool, int | None], list[str]] = defaultdict(list)
        for name in group.layer_names:
            kinds[name in window_of, window_of.get(name)].append(name)
        has_windows = any(window is not None for _, window in kinds)
        if not has_windows or len(kinds) == 1 or group.backend.get_name() != "FLASHINFER":
            groups.append(group)
            continue
        builders = group.metadata_builders
        for names in kinds.values():
            part = replace(group, layer_names=names, metadata_builders=[])
            part.create_metadata_builders(
                vllm_config, device, builders[0].kv_cache_spec.block_size, len(builders)
            )
            _share_workspace(group, part)
            groups.append(part)


def _share_workspace(group: AttentionGroup, part: AttentionGroup) -> None:
    """Share FlashInfer's workspace (hundreds of MiB): builders use it in turn, as in vLLM."""
    if hasattr(first := group.get_metadata_builder(), "_get_workspace_buffer"):
        for builder in part.metadata_builders:
            cast(Any, builder).set_workspace_buffer(first._get_workspace_buffer())


def _with_cache_type(vllm_config: VllmConfig, cache_dtype: str) -> VllmConfig:
    if cache_dtype == vllm_config.cache_config.cache_dtype:
        return vllm_config
    changed = copy(vllm_config)
    changed.cache_config = copy(vllm_config.cache_config)
    changed.cache_config.cache_dtype = cache_dtype
    return changed
