"""The engine's config as the drafter's layers and graphs are to have it."""

from __future__ import annotations

from copy import copy

from vllm.config import VllmConfig, replace
from vllm.model_executor.model_loader.utils import get_draft_load_config


def drafter_layers(config: VllmConfig, requires_non_causal: bool) -> VllmConfig:
    """To build the drafter's layers with: attention backend, cache type and loading are its own."""
    speculative = config.speculative_config
    assert speculative is not None
    attention = replace(
        config.attention_config,
        use_non_causal=requires_non_causal,
        backend=speculative.attention_backend,
    )
    cache = config.cache_config
    if speculative.kv_cache_dtype is not None:
        cache = replace(cache, cache_dtype=speculative.kv_cache_dtype)
    return replace(
        config,
        attention_config=attention,
        cache_config=cache,
        load_config=get_draft_load_config(config),
    )


def one_width(config: VllmConfig) -> VllmConfig:
    """To capture the drafter's graphs with: lengths that differ are the target's alone."""
    alone = copy(config)
    alone.speculative_config = copy(config.speculative_config)
    assert alone.speculative_config is not None
    alone.speculative_config.num_speculative_tokens_per_batch_size = None
    return alone
