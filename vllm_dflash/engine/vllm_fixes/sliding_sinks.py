"""Targets like gpt-oss write right tokens on CPU where sliding and full layers share a cache group.

Wrong in vLLM 0.32.0, CPU: such layers get attention planned for no window; the kernel then splits
the keys of a sliding layer, and where a part lies outside the window and the layer has sinks, reads
what nobody wrote: wrong tokens from plain decoding as well (`--disable-hybrid-kv-cache-manager`).
Not reported yet (docs/engineering/upstream.md). Delete this file when `cpu_attention_with_kv_cache`
skips parts outside the window.
"""

from __future__ import annotations

import os

from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention


def mend_sliding_sinks(vllm_config: VllmConfig) -> None:
    """Once the layers are known: vLLM's own setting against split keys, where it is needed."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    attentions = [layer for layer in layers if isinstance(layer, Attention)]
    windows = {layer.sliding_window for layer in attentions}
    if len(windows) > 1 and any(layer.has_sink for layer in attentions):
        os.environ["VLLM_CPU_ATTN_SPLIT_KV"] = "0"
