"""The memory that a pair needs on each rank: the drafter's weights, and the KV cache per token."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

from vllm_dflash.checkpoint.headers import Tensor
from vllm_dflash.checkpoint.pairing import drafter_ranks
from vllm_dflash.checkpoint.refusal import without_frame
from vllm_dflash.checkpoint.spec import DrafterSpec
from vllm_dflash.checkpoint.tensors import expected_tensors, quantised_parts, required_vocabulary
from vllm_dflash.tools.inspect.inspection import CacheFacts, Inspection, MemoryFacts

VOCABULARY_ALIGNMENT = 64
"""vLLM pads embeddings and heads to a multiple of this many rows."""
D2T_BYTES = 8
SPLIT = (
    *("q_proj.weight", "q_proj.bias", "o_proj.weight", "attention_sink_bias"),
    *("gate_proj.weight", "up_proj.weight", "down_proj.weight"),
)
"""Tensors that are split over the ranks."""
PER_KV_HEAD = ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias")
COUNTED = {"auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"}
COUNTED |= {"fp8_per_token_head", "int8_per_token_head"}
"""Cache dtypes that do not pack numbers; the last two also keep scales."""
SCALE_BYTES = 4


def inspect_memory(
    found: Inspection,
    tensors: Mapping[str, Tensor],
    args: EngineArgs,
    tp_size: int,
    draft_cache: str | None = None,
) -> None:
    """Fill in `found.memory`, and the warnings and unchecked facts that follow from it.

    Args:
        found: an inspection that has a drafter and a target.
        tensors: tensors of the drafter's checkpoint; empty if unknown.
        args: arguments of the target's engine on one rank.
        tp_size: number of ranks.
        draft_cache: dtype of the drafter's cache, if it differs from the target's.
    """
    spec, target = found.drafter, found.target
    assert spec is not None
    assert target is not None
    cache = None
    try:
        cache = _cache_facts(spec, args.create_engine_config(), tp_size, draft_cache)
    except Exception as error:  # vLLM may refuse this config here
        found.not_checked.append(f"KV cache: {without_frame(error) or type(error).__name__}")
    else:
        _describe_windows(found, cache.sliding_target_layers)
    itemsize = getattr(torch, target.dtype).itemsize
    found.memory = MemoryFacts(
        platform=current_platform.device_name,
        tensor_parallel_size=tp_size,
        drafter_tensor_parallel_size=drafter_ranks(spec, tp_size),
        drafter_weights=loaded_weights(spec, tensors, itemsize, tp_size),
        cache=cache,
    )


def loaded_weights(
    spec: DrafterSpec, found: Mapping[str, Tensor], itemsize: int, tp_size: int = 1
) -> int:
    """Return the bytes of a drafter's weights on each rank.

    Includes a second copy of all layers' K and V projections, stacked for the context; excludes the
    target's embedding and head. The drafter's own embedding and head are split over all ranks, and
    its layers if they divide. Quantised tensors keep their size in the file.

    Args:
        spec: the drafter's spec.
        found: tensors of its checkpoint; empty if unknown.
        itemsize: bytes per number of tensors that are not quantised.
        tp_size: ranks of the target.
    """
    ranks = drafter_ranks(spec, tp_size)
    kv_heads = max(1, spec.num_kv_heads // ranks)

    def on_a_rank(name: str, whole: int) -> int:
        if name.endswith(PER_KV_HEAD):
            return whole // spec.num_kv_heads * kv_heads
        return whole // ranks if name.endswith(SPLIT) else whole

    parts = quantised_parts(spec, found.keys())
    own_vocabulary = found.keys() | required_vocabulary(spec)
    num_bytes = D2T_BYTES * spec.draft_vocab_size if "d2t" in own_vocabulary else 0
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


# --- the KV cache -----------------------------------------------------------------------------


def _cache_facts(
    spec: DrafterSpec, config: VllmConfig, tp_size: int, draft_cache: str | None
) -> CacheFacts:
    """Return facts about each rank's cache. Raises ValueError if the config does not tell its
    size."""
    written = config.cache_config.cache_dtype
    vectors, sliding = _target_cache(config, tp_size)
    target_bytes = _num_bytes(vectors, written, config.model_config)
    # Windows do not matter: our sliding layers keep the whole context.
    heads = max(1, spec.num_kv_heads // drafter_ranks(spec, tp_size))
    own = [spec.head_dim] * (2 * heads * spec.num_layers)
    own_bytes = _num_bytes(own, draft_cache or written, config.model_config)
    return CacheFacts(
        block_size=config.cache_config.block_size,
        drafter_bytes_per_token=own_bytes,
        target_bytes_per_token=target_bytes,
        sliding_target_layers=sliding,
    )


def _num_bytes(vectors: list[int], cache_dtype: str, model: ModelConfig) -> int:
    """Return the bytes of `vectors` (numbers in each). Raises ValueError for an unknown dtype."""
    if cache_dtype not in COUNTED:
        raise ValueError(
            f"vLLM packs the numbers of a {cache_dtype} cache, so its size is only known once it"
            " runs"
        )
    scale = 0
    if cache_dtype.endswith("per_token_head"):
        if current_platform.is_cpu():
            raise ValueError(f"vLLM has no kernels for a {cache_dtype} cache on CPUs")
        scale = SCALE_BYTES
    itemsize = kv_cache_dtype_str_to_dtype(cache_dtype, model).itemsize
    return sum(vectors) * itemsize + len(vectors) * scale


def _target_cache(config: VllmConfig, tp_size: int) -> tuple[list[int], int]:
    """Return what the target caches per token on each rank: the sizes of its vectors.

    Also returns the number of layers whose window is shorter than `max_model_len`. Raises
    ValueError for a target that is not a plain transformer, whose config does not tell.
    """
    model = config.model_config
    for what, has_it in (
        ("layers other than attention", model.is_hybrid or model.is_attention_free),
        ("layers without attention", model.has_noops),
        ("an encoder", model.is_encoder_decoder),
        ("chunked local attention", model.attention_chunk_size is not None),
        # vLLM 0.33
        ("its own grouping of caches", getattr(model, "supports_kv_cache_grouping", False)),
    ):
        if has_it:
            raise ValueError(f"the target has {what}, so its size is only known once it runs")
    text = model.hf_text_config
    num_layers = model.get_total_num_hidden_layers()
    kinds = getattr(text, "layer_types", None) or [""] * num_layers
    vectors: list[int] = []
    sliding = 0
    # In newer Gemma models, the last `num_kv_shared_layers` layers read the cache of earlier ones.
    for number in range(num_layers - (getattr(text, "num_kv_shared_layers", 0) or 0)):
        shape = model.model_arch_config[number]
        if model.use_mla:  # one vector for the keys and values of all heads
            vectors.append(shape.head_size)
        else:
            heads = max(1, shape.total_num_kv_heads // tp_size)
            vectors += [shape.head_size] * (2 * heads)
        window = config.cache_config.sliding_window
        if window is None and kinds[number] == "sliding_attention":
            window = model.get_sliding_window()
        sliding += window is not None and window < model.max_model_len
    return vectors, sliding


def _describe_windows(found: Inspection, sliding: int) -> None:
    """Report what the windows of `sliding` layers of the target mean for its cache."""
    if not sliding:
        return
    if not current_platform.is_cpu():
        found.not_checked.append(
            f"what windows save: {sliding} of the target's layers have one, but the KV cache is"
            " counted as if they kept the whole context"
        )
        return
    found.warnings.append(
        f"{sliding} of the target's layers have a sliding window. Without DFlash, vLLM keeps"
        " only their windows; with DFlash on this platform, they keep the whole context like"
        " all others, since drafters on V1 have a single cache group"
    )
