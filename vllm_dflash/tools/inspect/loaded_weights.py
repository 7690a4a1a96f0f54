"""What a drafter's weights take in memory once vLLM has loaded them."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from vllm_dflash.checkpoint.headers import Tensor
from vllm_dflash.checkpoint.pairing import drafter_ranks
from vllm_dflash.checkpoint.spec import DrafterSpec
from vllm_dflash.checkpoint.tensors import expected_tensors, quantised_parts

VOCABULARY_ALIGNMENT = 64
"""vLLM pads embeddings and heads to a multiple of this many rows."""
D2T_BYTES = 8
BY_ROWS = ("q_proj.weight", "q_proj.bias", "gate_proj.weight", "up_proj.weight")
SPLIT = (*BY_ROWS, "o_proj.weight", "down_proj.weight", "attention_sink_bias")
PER_KV_HEAD = ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias")


def loaded_weights(
    spec: DrafterSpec, found: Mapping[str, Tensor], itemsize: int, tp_size: int = 1
) -> int:
    """Bytes on each rank of a drafter whose checkpoint has the `found` tensors.

    With a second copy of all layers' K and V projections, stacked for the context. The target's
    embedding and head do not count. An embedding and a head of its own are split over all ranks,
    its layers where they divide. What is quantised stays as large as it is in the file.

    Args:
        spec: of the drafter.
        found: its checkpoint's tensors.
        itemsize: bytes of a number where nothing is quantised.
        tp_size: ranks of the target.
    """
    ranks = drafter_ranks(spec, tp_size)
    kv_heads = max(1, spec.num_kv_heads // ranks)

    def on_a_rank(name: str, whole: int) -> int:
        if name.endswith(PER_KV_HEAD):
            return whole // spec.num_kv_heads * kv_heads
        if name.endswith(SPLIT):
            return whole // ranks
        return whole

    parts = quantised_parts(spec, found.keys())
    numbers = sum(
        on_a_rank(name, prod(shape))
        for name, shape in expected_tensors(spec).items()
        if name not in parts
    )
    for name, rows in (
        ("embed_tokens.weight", spec.vocab_size),
        ("lm_head.weight", spec.draft_vocab_size),
    ):
        if name in found:
            padded = -(-rows // VOCABULARY_ALIGNMENT) * VOCABULARY_ALIGNMENT
            numbers += padded // tp_size * spec.hidden_size
    parameters = numbers * itemsize
    for name, inside in parts.items():
        parameters += on_a_rank(name, sum(found[part].num_bytes for part in inside))
    if "d2t" in found:
        parameters += spec.draft_vocab_size * D2T_BYTES
    if any("self_attn" in name for name in parts):  # layers project context themselves
        return parameters + spec.num_layers * spec.head_dim * itemsize  # norms
    inputs = spec.hidden_size + (1 if spec.attention_bias else 0)
    per_layer = 2 * kv_heads * spec.head_dim * inputs + spec.head_dim  # and the K norm
    return parameters + spec.num_layers * per_layer * itemsize
