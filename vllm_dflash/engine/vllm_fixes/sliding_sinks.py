"""On CPU, targets like gpt-oss write wrong tokens if all layers share a cache group.

They do on V1, since our hook "one cache group" sets `disable_hybrid_kv_cache_manager`. Delete this
file when `cpu_attention_with_kv_cache` skips parts outside the window
(docs/engineering/upstream.md#sliding_sinkspy).
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
