"""What a pair takes of memory, and what a budget for the KV cache holds."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm_dflash.checkpoint.headers import Tensor
from vllm_dflash.checkpoint.ranks import drafter_ranks
from vllm_dflash.checkpoint.spec import DrafterSpec
from vllm_dflash.tools.inspect.cache_layers import UnknownCacheError, drafter_layers, target_layers
from vllm_dflash.tools.inspect.cache_plan import CachePlan, CacheRefusedError, Capacity
from vllm_dflash.tools.inspect.inspection import Budget, CacheFacts, Fault, Inspection, MemoryFacts
from vllm_dflash.tools.inspect.loaded_weights import loaded_weights
from vllm_dflash.tools.inspect.sizes import GIB, format_size
from vllm_dflash.tools.inspect.target import EngineOptions, engine_config

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

OPTION, ENVIRONMENT = "--kv-cache-memory", "VLLM_CPU_KVCACHE_SPACE"
EXAMPLES = (1 * GIB, 4 * GIB, 16 * GIB, 64 * GIB)
SHARED_POOL = (
    "{} of the target's layers look back through a window only. Without DFlash vLLM keeps no more"
    " of them; with it, on this platform, they keep the whole context like all others, since V1's"
    " drafters have one cache group: compare both columns"
)


def memory_facts(
    found: Inspection,
    spec: DrafterSpec,
    tensors: Mapping[str, Tensor],
    model: ModelConfig,
    kv_cache_memory: int | None,
    options: EngineOptions,
) -> None:
    """Fill in `found.memory`, and what follows from it: faults, warnings, gaps.

    Args:
        found: so far.
        spec: of the drafter.
        tensors: of the drafter's checkpoint.
        model: vLLM's config of the target.
        kv_cache_memory: bytes, or None.
        options: of the engine.
    """
    from vllm.platforms import current_platform

    from vllm_dflash.seams import UnsupportedVllmError

    if any(fault.kind == "parallel" for fault in found.faults):
        found.not_checked.append("memory: the target does not divide among so many ranks")
        return
    tp_size = options.tensor_parallel_size
    weights = loaded_weights(spec, tensors, model.dtype.itemsize, tp_size)
    cache = None
    try:
        config = engine_config(found.target_model, options)
        cache = _cache_facts(found, spec, config, kv_cache_memory, tp_size)
    except CacheRefusedError as error:
        found.faults.append(
            Fault("memory", f"vLLM makes no KV cache for these two, so it does not start: {error}")
        )
    except UnknownCacheError as error:
        found.not_checked.append(f"KV cache: {error}, so its size is only known once it runs")
    except (ValueError, UnsupportedVllmError) as error:
        found.not_checked.append(f"KV cache: {error}")
    found.memory = MemoryFacts(
        platform=current_platform.device_name,
        tensor_parallel_size=tp_size,
        drafter_tensor_parallel_size=drafter_ranks(spec, tp_size),
        dtype=str(model.dtype).removeprefix("torch."),
        kv_cache_dtype=options.kv_cache_dtype or "auto",
        max_model_len=model.max_model_len,
        drafter_weights=weights.parameters,
        drafter_context_projection=weights.context_projection,
        waiting_context=_waiting_context(spec, model.dtype.itemsize),
        cache=cache,
    )
    if cache is not None:
        _judge(found, cache, kv_cache_memory, model.max_model_len)


def _waiting_context(spec: DrafterSpec, itemsize: int) -> int:
    """The ring of context rows that wait, when it is full; only the V1 runner has one."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return 0
    from vllm_dflash.engine.v1.backlog import MAX_BYTES, MAX_ROWS

    return min(MAX_BYTES, MAX_ROWS * len(spec.taps) * spec.target_hidden_size * itemsize)


def _cache_facts(
    found: Inspection,
    spec: DrafterSpec,
    config: VllmConfig,
    kv_cache_memory: int | None,
    tp_size: int,
) -> CacheFacts:
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

    of_target = target_layers(config, tp_size)
    of_drafter = drafter_layers(spec, drafter_ranks(spec, tp_size))
    one_group = True if current_platform.is_cpu() else None  # as the plugin sets it
    alone = CachePlan(config, of_target, one_group=one_group)
    both = CachePlan(config, [*of_target, *of_drafter], one_group=one_group)
    try:
        plain = CachePlan(config, of_target)
    except CacheRefusedError as error:
        plain = None
        found.not_checked.append(f"KV cache without DFlash: {error}")
    itemsize = kv_cache_dtype_str_to_dtype(
        config.cache_config.cache_dtype, config.model_config
    ).itemsize
    source = OPTION if kv_cache_memory is not None else None
    if kv_cache_memory is None and (kv_cache_memory := _environment_budget()) is not None:
        source = ENVIRONMENT
    budgets = EXAMPLES if kv_cache_memory is None else (kv_cache_memory,)
    sliding = sum(layer.window is not None for layer in of_target)
    if sliding and one_group and plain and plain.request_bytes() < alone.request_bytes():
        found.warnings.append(SHARED_POOL.format(sliding))
    return CacheFacts(
        block_size=both.block_size,
        groups=both.num_groups,
        groups_without=plain.num_groups if plain else None,
        drafter_bytes_per_token=sum(layer.bytes_per_token(itemsize) for layer in of_drafter),
        target_bytes_per_token=sum(layer.bytes_per_token(itemsize) for layer in of_target),
        bytes_per_block=both.bytes_per_block,
        drafter_share=1 - alone.request_bytes() / both.request_bytes(),
        sliding_target_layers=sliding,
        budget_source=source,
        budgets=[
            _budget(both.capacity(budget), plain.capacity(budget) if plain else None)
            for budget in budgets
        ],
    )


def _environment_budget() -> int | None:
    """Bytes, where vLLM takes them from its environment. Raises ValueError for no number."""
    from vllm.platforms import current_platform

    written = os.environ.get(ENVIRONMENT)
    return int(written) * GIB if written and current_platform.is_cpu() else None


def _budget(both: Capacity, plain: Capacity | None) -> Budget:
    return Budget(
        num_bytes=both.budget,
        tokens=both.tokens,
        max_concurrency=both.max_concurrency,
        longest_request=both.longest_request,
        holds_one_request=both.holds_one_request,
        tokens_without=plain.tokens if plain else None,
        max_concurrency_without=plain.max_concurrency if plain else None,
        longest_request_without=plain.longest_request if plain else None,
    )


def _judge(
    found: Inspection, cache: CacheFacts, kv_cache_memory: int | None, max_model_len: int
) -> None:
    """Say so where the budget is too small for vLLM to start."""
    if cache.budget_source is None:
        return
    (budget,) = cache.budgets
    if not budget.holds_one_request:
        longest = budget.longest_request
        message = (
            f"{format_size(budget.num_bytes)} of KV cache ({cache.budget_source}) do not hold one"
            f" request of max_model_len {max_model_len}, so vLLM does not start; "
            + (f"pass --max-model-len {longest} or less, or " if longest else "")
            + "give it more memory"
        )
        if kv_cache_memory is None:
            found.warnings.append(message)
        else:
            found.faults.append(Fault("memory", message))
    in_environment = _environment_budget()
    if kv_cache_memory is not None and in_environment not in (None, kv_cache_memory):
        found.warnings.append(
            f"{ENVIRONMENT} is set, and on CPUs it overrides --kv-cache-memory-bytes: unset it"
        )
