"""How vLLM lays out the caches of given layers, and what a budget of memory holds then.

Grouping, page sizes and capacity are vLLM's own functions, so whatever it pads or unifies is in
the figures. Only the layers come from us, since no model is built.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vllm_dflash.seams import CACHE_BUILDER, CACHE_PLAN, CACHE_PLANNING, CACHE_UTILS, check_seams
from vllm_dflash.tools.inspect.cache_layers import CacheLayer

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionBackend
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec


class CacheRefusedError(ValueError):
    """vLLM cannot make a cache of some layers; the message is its own."""


@dataclass(frozen=True)
class Capacity:
    """What a budget holds, on each tensor-parallel rank."""

    budget: int
    """Bytes."""
    blocks: int
    tokens: int
    """As vLLM logs it at start: "KV cache size: N tokens"."""
    max_concurrency: float
    """Requests of `max_model_len` tokens that fit at a time, as vLLM logs it."""
    longest_request: int
    """Tokens of the longest request that fits, at most the target's limit; 0: none does."""
    holds_one_request: bool
    """Of `max_model_len` tokens; vLLM does not start otherwise."""


def _planning(config: VllmConfig) -> tuple[ModuleType, tuple[Any, ...]]:
    """vLLM's module of cache plans, and what its sizing functions want first."""
    try:
        module = import_module(CACHE_PLANNING)  # from vLLM 0.33 on
    except ImportError:
        return import_module(CACHE_UTILS), ()
    return module, (import_module(CACHE_BUILDER).get_kv_cache_config_builder(config),)


class CachePlan:
    """The groups vLLM makes of some layers."""

    def __init__(
        self, config: VllmConfig, layers: Sequence[CacheLayer], *, one_group: bool | None = None
    ) -> None:
        """For an engine of this config, whose own layers do not count.

        Args:
            config: gives block size, types and limits.
            layers: all of them, in order.
            one_group: whether vLLM's hybrid cache manager is off; None: as `config` says.

        Raises:
            CacheRefusedError: vLLM cannot make a cache of these layers.
            UnsupportedVllmError: this vLLM has other functions.
        """
        check_seams(CACHE_PLAN)
        self._vllms, self._first = _planning(config)
        self._config = config
        self._one_group = one_group
        try:
            with self._settings():
                specs = self._specs(layers)
                self._groups: list[KVCacheGroupSpec] = self._vllms.get_kv_cache_groups(
                    config, specs
                )
            self.bytes_per_block = self._bytes_per_block()
        except (ValueError, NotImplementedError) as error:
            raise CacheRefusedError(str(error)) from error

    @property
    def num_groups(self) -> int:
        """Groups of layers, each with a block table of its own."""
        return len(self._groups)

    @property
    def block_size(self) -> int:
        """Tokens of a block, of the first group."""
        return self._groups[0].kv_cache_spec.block_size

    def request_bytes(self) -> int:
        """What one request of `max_model_len` tokens takes of the pool."""
        with self._settings():
            return self._vllms._max_memory_usage_bytes_from_groups(
                *self._first, self._config, self._groups
            )

    def capacity(self, budget: int) -> Capacity:
        """What `budget` bytes hold."""
        from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity

        usable = budget - self.bytes_per_block  # vLLM keeps one block for itself
        with self._settings():
            cache = self._vllms.get_kv_cache_config_from_groups(self._config, self._groups, budget)
            tokens, max_concurrency = get_kv_cache_capacity(self._config, cache)
            longest = self._vllms._estimate_max_model_len_from_groups(
                *self._first, self._config, self._groups, usable
            )
        return Capacity(
            budget=budget,
            blocks=cache.num_blocks,
            tokens=tokens,
            max_concurrency=max_concurrency,
            longest_request=longest,
            holds_one_request=self.request_bytes() <= usable,
        )

    def _bytes_per_block(self) -> int:
        with self._settings():
            layout = self._config.cache_config.get_resolved_kv_cache_layout()
            self._vllms.validate_kv_cache_layout(layout, self._groups)
            return self._vllms._pool_bytes_per_block(self._config, self._groups)

    @contextmanager
    def _settings(self) -> Iterator[None]:
        """The config as an engine with these layers would have it, for the time being."""
        scheduler, cache = self._config.scheduler_config, self._config.cache_config
        before = scheduler.disable_hybrid_kv_cache_manager, cache.kv_cache_layout
        if self._one_group is not None:
            scheduler.disable_hybrid_kv_cache_manager = self._one_group
        cache.kv_cache_layout = getattr(self, "_layout", None)
        try:
            yield
        finally:
            scheduler.disable_hybrid_kv_cache_manager, cache.kv_cache_layout = before

    def _specs(self, layers: Sequence[CacheLayer]) -> dict[str, Any]:
        """vLLM's description of each layer, packed as its attention backend packs it."""
        from vllm.config import set_current_vllm_config
        from vllm.v1.attention.backends.utils import (
            get_supported_kv_cache_layouts,
            resolve_kv_cache_layout,
        )
        from vllm.v1.worker.utils import select_common_block_size

        specs: dict[str, Any] = {}
        backends: list[type[AttentionBackend]] = []
        with set_current_vllm_config(self._config):
            for number, layer in enumerate(layers):
                backends.append(attention_backend(self._config, layer))
                specs[f"layers.{number}"] = cache_spec(self._config, layer, backends[-1])
        select_common_block_size(
            self._config.cache_config.block_size, backends, list(specs.values())
        )
        layouts = get_supported_kv_cache_layouts(backends)
        names = [layout.name for layout in layouts]
        self._layout = resolve_kv_cache_layout(self._config, [names], specs.values()).name
        return specs


def attention_backend(
    config: VllmConfig, layer: CacheLayer, *, has_sink: bool = False
) -> type[AttentionBackend]:
    """What vLLM takes for such a layer. `config` must be vLLM's current one."""
    from vllm.v1.attention.selector import get_attn_backend

    return get_attn_backend(
        layer.head_size,
        config.model_config.dtype,
        config.cache_config.cache_dtype,
        use_mla=layer.latent,
        has_sink=has_sink,
        has_sliding_window=layer.window is not None,
    )


def cache_spec(config: VllmConfig, layer: CacheLayer, backend: type[AttentionBackend]) -> Any:
    """vLLM's description of a layer's cache, as the backend packs it."""
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
        get_kv_quant_mode,
    )
    from vllm.v1.worker.utils import customize_attention_spec

    cache = config.cache_config
    shape: dict[str, Any] = {
        "block_size": cache.block_size,
        "num_kv_heads": layer.kv_heads,
        "head_size": layer.head_size,
        "dtype": kv_cache_dtype_str_to_dtype(cache.cache_dtype, config.model_config),
        "kv_quant_mode": get_kv_quant_mode(cache.cache_dtype),
    }
    spec: FullAttentionSpec | SlidingWindowSpec
    if layer.latent:
        spec = MLAAttentionSpec(**shape, cache_dtype_str=cache.cache_dtype)
    elif layer.window is not None:
        spec = SlidingWindowSpec(**shape, sliding_window=layer.window)
    else:
        spec = FullAttentionSpec(**shape)
    return customize_attention_spec(backend, spec)
