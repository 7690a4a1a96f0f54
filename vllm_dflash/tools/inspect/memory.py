"""What a pair takes of memory, and what a KV cache of a given size holds; on each rank."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import ByteSize

from vllm_dflash.checkpoint.headers import Tensor
from vllm_dflash.checkpoint.pairing import drafter_ranks
from vllm_dflash.checkpoint.spec import DrafterSpec
from vllm_dflash.tools.inspect.inspection import Budget, CacheFacts, Fault, Inspection, MemoryFacts
from vllm_dflash.tools.inspect.loaded_weights import loaded_weights
from vllm_dflash.tools.inspect.target import EngineOptions, engine_config

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

GIB = 1 << 30
UNPACKED = {"auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"}
"""Cache types that keep a number in as many bytes as it has."""
OPTION, ENVIRONMENT = "--kv-cache-memory", "VLLM_CPU_KVCACHE_SPACE"
EXAMPLES = (1 * GIB, 4 * GIB, 16 * GIB, 64 * GIB)
WINDOWS_LOST = (
    "{} of the target's layers look back through a window only. Without DFlash vLLM keeps no more"
    " of them; with it, on this platform, they keep the whole context like all others, since V1's"
    " drafters have one cache group"
)
WINDOWS_NOT_COUNTED = (
    "what windows save: {} of the target's layers have one, and the KV cache is counted as if they"
    " kept the whole context"
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

    if any(fault.kind == "parallel" for fault in found.faults):
        found.not_checked.append("memory: the target does not divide among so many ranks")
        return
    tp_size = options.tensor_parallel_size
    cache = None
    try:
        config = engine_config(found.target_model, options)
        cache = _cache_facts(found, spec, config, kv_cache_memory, tp_size)
    except ValueError as error:
        found.not_checked.append(f"KV cache: {error}")
    found.memory = MemoryFacts(
        platform=current_platform.device_name,
        tensor_parallel_size=tp_size,
        drafter_tensor_parallel_size=drafter_ranks(spec, tp_size),
        max_model_len=model.max_model_len,
        drafter_weights=loaded_weights(spec, tensors, model.dtype.itemsize, tp_size),
        cache=cache,
    )
    if cache is not None:
        _judge(found, cache, kv_cache_memory, model.max_model_len)


def _cache_facts(
    found: Inspection,
    spec: DrafterSpec,
    config: VllmConfig,
    kv_cache_memory: int | None,
    tp_size: int,
) -> CacheFacts:
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

    if (written := config.cache_config.cache_dtype) not in UNPACKED:
        raise ValueError(f"vLLM packs a cache of {written}, so its size is only known once it runs")
    dtype = kv_cache_dtype_str_to_dtype(written, config.model_config)
    numbers, sliding = _target_cache(config, tp_size)
    of_target = numbers * dtype.itemsize
    # Windows do not matter: a sliding layer of ours keeps the whole context.
    heads = max(1, spec.num_kv_heads // drafter_ranks(spec, tp_size))
    of_drafter = 2 * heads * spec.head_dim * spec.num_layers * dtype.itemsize
    if sliding and current_platform.is_cpu():
        found.warnings.append(WINDOWS_LOST.format(sliding))
    elif sliding:
        found.not_checked.append(WINDOWS_NOT_COUNTED.format(sliding))
    source = OPTION if kv_cache_memory is not None else None
    if kv_cache_memory is None and (kv_cache_memory := _environment_budget()) is not None:
        source = ENVIRONMENT
    block_size, max_model_len = config.cache_config.block_size, config.model_config.max_model_len
    return CacheFacts(
        block_size=block_size,
        drafter_bytes_per_token=of_drafter,
        target_bytes_per_token=of_target,
        sliding_target_layers=sliding,
        budget_source=source,
        budgets=[
            _budget(num_bytes, of_target + of_drafter, block_size, max_model_len)
            for num_bytes in (EXAMPLES if kv_cache_memory is None else (kv_cache_memory,))
        ],
    )


def _target_cache(config: VllmConfig, tp_size: int) -> tuple[int, int]:
    """Numbers that a rank keeps of a token, and layers whose window is shorter than a request.

    Raises ValueError for a target that is no plain transformer, so that its config does not say.
    """
    model = config.model_config
    for what, has_it in (
        ("layers that are no attention", model.is_hybrid or model.is_attention_free),
        ("layers without attention", model.has_noops),
        ("an encoder", model.is_encoder_decoder),
        ("chunked local attention", model.attention_chunk_size is not None),
        # vLLM 0.33
        ("a grouping of caches of its own", getattr(model, "supports_kv_cache_grouping", False)),
    ):
        if has_it:
            raise ValueError(f"the target has {what}, so its size is only known once it runs")
    text = model.hf_text_config
    num_layers = model.get_total_num_hidden_layers()
    kinds = getattr(text, "layer_types", None) or [""] * num_layers
    numbers = sliding = 0
    # The last so many of Gemma's newer models read the cache of layers before them.
    for number in range(num_layers - (getattr(text, "num_kv_shared_layers", 0) or 0)):
        shape = model.model_arch_config[number]
        if model.use_mla:  # one vector for keys and values of all heads
            numbers += shape.head_size
        else:
            numbers += 2 * max(1, shape.total_num_kv_heads // tp_size) * shape.head_size
        window = config.cache_config.sliding_window
        if window is None and kinds[number] == "sliding_attention":
            window = model.get_sliding_window()
        sliding += window is not None and window < model.max_model_len
    return numbers, sliding


def _budget(num_bytes: int, bytes_per_token: int, block_size: int, max_model_len: int) -> Budget:
    """As vLLM has it, of layers that keep the whole context: one pool of blocks for all of them."""
    blocks = num_bytes // (bytes_per_token * block_size)
    max_concurrency = blocks / -(-max_model_len // block_size)
    usable = max(blocks - 1, 0)  # vLLM keeps one for itself
    return Budget(
        num_bytes=num_bytes,
        tokens=int(max_concurrency * max_model_len),
        max_concurrency=max_concurrency,
        longest_request=min(usable * block_size, max_model_len),
    )


def _environment_budget() -> int | None:
    """Bytes, where vLLM takes them from its environment. Raises ValueError for no number."""
    from vllm.platforms import current_platform

    written = os.environ.get(ENVIRONMENT)
    return int(written) * GIB if written and current_platform.is_cpu() else None


def _judge(
    found: Inspection, cache: CacheFacts, kv_cache_memory: int | None, max_model_len: int
) -> None:
    """Say so where the budget is too small for vLLM to start."""
    from vllm.platforms import current_platform

    if cache.budget_source is None:
        return
    (budget,) = cache.budgets
    if (longest := budget.longest_request) < max_model_len:
        size = ByteSize(budget.num_bytes).human_readable(separator=" ")
        if cache.sliding_target_layers and not current_platform.is_cpu():
            found.not_checked.append(
                f"whether {size} of KV cache ({cache.budget_source}) hold a request of"
                f" max_model_len {max_model_len}: they would not if all layers kept all of it"
            )
            return
        message = (
            f"{size} of KV cache ({cache.budget_source}) do not hold one"
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
