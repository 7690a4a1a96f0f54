"""Targets like gpt-oss write correct tokens on CPU if sliding and full layers share a cache group.

Wrong in vLLM 0.32.0, CPU: the attention of such a group is planned without a window. The kernel
then splits the keys of a sliding layer, and if the layer has sinks and a part is outside the
window, it reads memory that was not written: wrong tokens. They share a group where
`disable_hybrid_kv_cache_manager` is set: our hook "one cache group" sets it on V1; plain decoding
is affected only if its user does. Not reported yet (docs/engineering/upstream.md). Delete this file
when `cpu_attention_with_kv_cache` skips parts outside the window.
"""

from __future__ import annotations

import os

from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention


def fix_sliding_sinks(vllm_config: VllmConfig) -> None:
    """Turn off split keys, with vLLM's own setting, if the layers need it. Call after loading."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    attentions = [layer for layer in layers if isinstance(layer, Attention)]
    windows = {layer.sliding_window for layer in attentions}
    if len(windows) > 1 and any(layer.has_sink for layer in attentions):
        os.environ["VLLM_CPU_ATTN_SPLIT_KV"] = "0"
