"""The key/value cache that each layer of a target and of a drafter keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_dflash.checkpoint.spec import DrafterSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class UnknownCacheError(ValueError):
    """A target whose cache cannot be told from its config; the message says what it has."""


@dataclass(frozen=True)
class CacheLayer:
    """What one layer keeps of every token, on each tensor-parallel rank."""

    kv_heads: int
    head_size: int
    window: int | None = None
    """The layer attends to so many tokens; whether it also keeps no more is up to vLLM."""
    latent: bool = False
    """One vector for keys and values (MLA)."""

    def bytes_per_token(self, itemsize: int) -> int:
        """Of keys and values, in a type of `itemsize` bytes."""
        return self.kv_heads * self.head_size * itemsize * (1 if self.latent else 2)


def drafter_layers(spec: DrafterSpec, ranks: int) -> list[CacheLayer]:
    """One for each layer of the drafter, split over so many ranks.

    Windows are left out: a sliding layer of ours keeps the whole context (`DraftAttentionCache`).
    """
    layer = CacheLayer(max(1, spec.num_kv_heads // ranks), spec.head_dim)
    return [layer] * spec.num_layers


def target_layers(config: VllmConfig, tp_size: int) -> list[CacheLayer]:
    """One for each layer of the target that has a cache of its own.

    Raises:
        UnknownCacheError: it is no plain transformer, so its config does not say.
    """
    model = config.model_config
    for what, has_it in (
        ("layers that are no attention", model.is_hybrid or model.is_attention_free),
        ("layers without attention", model.has_noops),
        ("an encoder", model.is_encoder_decoder),
        ("chunked local attention", model.attention_chunk_size is not None),
        # From vLLM 0.33 on, by the names of layers, and those of a plan of ours are made up.
        ("a grouping of caches of its own", getattr(model, "supports_kv_cache_grouping", False)),
    ):
        if has_it:
            raise UnknownCacheError(f"the target has {what}")
    text = model.hf_text_config
    num_layers = model.get_total_num_hidden_layers()
    kinds = getattr(text, "layer_types", None) or [""] * num_layers
    layers = []
    # The last so many of Gemma's newer models read the cache of layers before them.
    for number in range(num_layers - (getattr(text, "num_kv_shared_layers", 0) or 0)):
        shape = model.model_arch_config[number]
        window = config.cache_config.sliding_window
        if window is None and kinds[number] == "sliding_attention":
            window = model.get_sliding_window()
        heads = 1 if model.use_mla else max(1, shape.total_num_kv_heads // tp_size)
        layers.append(CacheLayer(heads, shape.head_size, window, latent=model.use_mla))
    return layers
