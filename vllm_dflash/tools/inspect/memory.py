"""The memory that a drafter needs on each rank: its weights, and its part of the KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from vllm.config import ModelConfig
from vllm.platforms import current_platform
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype, resolve_kv_cache_dtype_string

from vllm_dflash.checkpoint.headers import Tensor
from vllm_dflash.checkpoint.pairing import drafter_ranks
from vllm_dflash.checkpoint.spec import DrafterSpec
from vllm_dflash.checkpoint.tensors import expected_tensors, quantised_parts, required_vocabulary
from vllm_dflash.tools.inspect.inspection import Inspection, MemoryFacts

VOCABULARY_ALIGNMENT = 64
"""vLLM pads embeddings and heads to a multiple of this many rows."""
SPLIT = (
    *("q_proj.weight", "q_proj.bias", "o_proj.weight", "attention_sink_bias"),
    *("gate_proj.weight", "up_proj.weight", "down_proj.weight"),
)
"""Tensors that are split over the ranks."""
PER_KV_HEAD = ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias")
COUNTED = {"auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"}
COUNTED |= {"fp8_per_token_head", "int8_per_token_head"}
"""Cache dtypes that do not pack numbers; the last two also keep scales."""


def inspect_memory(
    found: Inspection,
    tensors: Mapping[str, Tensor],
    model: ModelConfig,
    tp_size: int,
    cache_dtype: str,
) -> None:
    """Fill in `found.memory`, and the warnings and unchecked facts that follow from it.

    `tensors`: of the drafter's checkpoint; empty if unknown. `cache_dtype`: as in vLLM's options.
    """
    spec = found.drafter
    assert spec is not None
    cached = None
    try:
        cached = cache_bytes(spec, model, tp_size, cache_dtype)
    except ValueError as error:
        found.not_checked.append(f"KV cache: {error}")
    window = model.get_sliding_window()
    if current_platform.is_cpu() and window is not None and window < model.max_model_len:
        found.warnings.append(
            f"layers of the target have a sliding window of {window} tokens. Without DFlash, vLLM"
            " keeps only their windows; with DFlash on this platform, they keep the whole context"
            " like all others, since drafters on V1 have a single cache group"
        )
    found.memory = MemoryFacts(
        platform=current_platform.device_name,
        tensor_parallel_size=tp_size,
        drafter_tensor_parallel_size=drafter_ranks(spec, tp_size),
        drafter_weights=loaded_weights(spec, tensors, model.dtype.itemsize, tp_size),
        drafter_cache_per_token=cached,
    )


def cache_bytes(spec: DrafterSpec, model: ModelConfig, tp_size: int, cache_dtype: str) -> int:
    """Return the bytes of a token's keys and values in all layers of a drafter, on each rank.

    Windows do not matter: our sliding layers keep the whole context. Raises ValueError for a dtype
    whose size is not known.
    """
    resolved = resolve_kv_cache_dtype_string(cache_dtype, model)
    if resolved not in COUNTED:
        raise ValueError(
            f"vLLM packs the numbers of a {resolved} cache, so its size is only known once it runs"
        )
    scale = 0
    if resolved.endswith("per_token_head"):
        if current_platform.is_cpu():
            raise ValueError(f"vLLM has no kernels for a {resolved} cache on CPUs")
        scale = 4  # bytes
    itemsize = kv_cache_dtype_str_to_dtype(resolved, model).itemsize
    heads = max(1, spec.num_kv_heads // drafter_ranks(spec, tp_size))
    return 2 * heads * spec.num_layers * (spec.head_dim * itemsize + scale)


def loaded_weights(
    spec: DrafterSpec, found: Mapping[str, Tensor], itemsize: int, tp_size: int = 1
) -> int:
    """Return the bytes of a drafter's weights on each rank.

    Includes a second copy of all layers' K and V projections, stacked for the context; excludes the
    target's embedding and head. The drafter's own embedding and head are split over all ranks, and
    its layers if they divide. Quantised tensors keep their size in the file; others have `itemsize`
    bytes per number. `found`: tensors of the checkpoint, empty if unknown.
    """
    ranks = drafter_ranks(spec, tp_size)
    kv_heads = max(1, spec.num_kv_heads // ranks)

    def on_a_rank(name: str, whole: int) -> int:
        if name.endswith(PER_KV_HEAD):
            return whole // spec.num_kv_heads * kv_heads
        return whole // ranks if name.endswith(SPLIT) else whole

    parts = quantised_parts(spec, found.keys())
    own_vocabulary = found.keys() | required_vocabulary(spec)
    num_bytes = 8 * spec.draft_vocab_size if "d2t" in own_vocabulary else 0  # int64
    for name, inside in parts.items():
        num_bytes += on_a_rank(name, sum(found[part].num_bytes for part in inside))
    numbers = sum(
        on_a_rank(name, prod(shape))
        for name, shape in expected_tensors(spec).items()
        if name not in parts
    )
    rows_of = {"embed_tokens.weight": spec.vocab_size, "lm_head.weight": spec.draft_vocab_size}
    for name in rows_of.keys() & own_vocabulary:
        padded = -(-rows_of[name] // VOCABULARY_ALIGNMENT) * VOCABULARY_ALIGNMENT
        numbers += padded // tp_size * spec.hidden_size
    stacked = spec.head_dim  # K norm
    if not any("self_attn" in name for name in parts):  # otherwise layers project their context
        inputs = spec.hidden_size + (1 if spec.attention_bias else 0)
        stacked += 2 * kv_heads * spec.head_dim * inputs
    return num_bytes + (numbers + spec.num_layers * stacked) * itemsize
