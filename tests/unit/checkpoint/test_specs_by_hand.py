"""What each way of writing a config means, field by field; expected values written by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.configs_by_hand import (
    FULL,
    LLAMA3,
    QWEN,
    QWEN_SPEC,
    SLIDING,
    SPECULATORS,
    SPECULATORS_SPEC,
    WHOLE,
    Fields,
    nested,
)
from vllm_dflash.checkpoint.read import parse_config
from vllm_dflash.checkpoint.spec import DrafterSpec


@pytest.mark.parametrize("kind", WHOLE)
def test_every_field_of_a_config_reaches_a_worker(kind: str) -> None:
    config, fields = WHOLE[kind]
    before = json.dumps(config)
    spec = parse_config("it", config)
    assert spec.model_dump() == fields
    assert DrafterSpec.model_validate_json(spec.model_dump_json()) == spec
    assert json.dumps(config) == before  # the caller's config is unchanged


def test_a_users_window_limits_every_layer() -> None:
    spec = parse_config("it", {**QWEN, "layer_types": MIXED, "sliding_window": 20})
    assert [spec.layer_window(number) for number in range(5)] == [20, None, 20, 20, None]
    for window, found in ((12, [12] * 5), (30, [20, 30, 20, 20, 30])):
        limited = spec.model_copy(update={"draft_window": window})
        assert [limited.layer_window(number) for number in range(5)] == found
        assert DrafterSpec.model_validate_json(limited.model_dump_json()) == limited


def rope(**fields: Any) -> Fields:
    return {"rope_parameters": fields}


def mixed(window: int | None = None, **fields: Any) -> Fields:
    """Return layers of both types, and other fields."""
    return {"layer_types": MIXED, "sliding_window": window, **fields}


def windows(window: int) -> Fields:
    return {"windows": (window, None, window, window, None)}


YARN = {"rope_type": "yarn", "factor": 4.0}
THETA = {"rope_theta": 5000000}  # QWEN's, under any scaling
PART = {"partial_rotary_factor": 0.5}
ONE = {"rope_type": "default", "rope_theta": 1e4}
MIXED = [SLIDING, FULL, SLIDING, SLIDING, FULL]
OF_MIXED = {"causal": (True, False, True, True, False)}  # sliding layers are causal by default
ALL = {"causal": (True,) * 5}

# Changes to QWEN, and to its spec.
MEANINGS: list[tuple[Fields, Fields]] = [
    # transformers 4: rope_theta beside rope_scaling, whose rope_type was once called type.
    ({"rope_theta": 10000.0}, rope(**ONE)),
    ({"rope_theta": 7, "rope_scaling": {}}, rope(rope_type="default", rope_theta=7)),
    (
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        rope(rope_type="linear", factor=2.0, **THETA),
    ),
    ({"rope_scaling": LLAMA3}, rope(**LLAMA3, **THETA)),
    (
        {"rope_scaling": {**YARN, "original_max_position_embeddings": 4096}},
        rope(**YARN, original_max_position_embeddings=4096, **THETA),
    ),
    # If it does not say at how many positions it was trained: at all it has.
    ({"rope_scaling": YARN}, rope(**YARN, original_max_position_embeddings=40960, **THETA)),
    # transformers 5: all in one object. It counts; a theta that it leaves out is at top level.
    ({"rope_theta": 9, **rope(**ONE)}, rope(**ONE)),
    ({"rope_theta": 9, **rope(rope_type="default")}, rope(rope_type="default", rope_theta=9)),
    (
        {**rope(rope_type="linear", factor=2), "rope_scaling": {"type": "linear", "factor": 3}},
        rope(rope_type="linear", factor=2, **THETA),
    ),
    # Only a part of each head is rotated. Fields at top level count where the object has none.
    (PART, rope(rope_type="default", **THETA, **PART)),
    ({"partial_rotary_factor": None}, {}),
    ({**PART, **rope(**ONE, partial_rotary_factor=0.25)}, rope(**ONE, partial_rotary_factor=0.25)),
    # XiaomiMiMo/MiMo-V2.5-Pro-FP4-DFlash.
    ({"rope_theta": 10000, **PART}, rope(rope_type="default", rope_theta=10000, **PART)),
    # transformers 5: an entry for each type of layer. That of a type without layers is ignored.
    (rope(**{FULL: ONE, SLIDING: YARN}), rope(**ONE)),
    (rope(**{FULL: ONE, SLIDING: None}), rope(**ONE)),
    (mixed(7, **rope(**{FULL: ONE, SLIDING: ONE})), {**windows(7), **OF_MIXED, **rope(**ONE)}),
    # Fields that entries leave out are read at top level; fields beside entries are ignored.
    (
        {**PART, **rope(**{FULL: {"rope_theta": 1e4}}, rope_theta=9.0, factor=3.0)},
        rope(**ONE, **PART),
    ),
    ({"layer_types": None}, {}),
    (mixed(2048), {**windows(2048), **OF_MIXED}),
    ({"layer_types": [SLIDING] * 5, "sliding_window": 7}, {"windows": (7,) * 5, **ALL}),
    # A window inside dflash_config comes before one outside, unless it is null.
    (mixed(2048, **nested(swa_window_size=512)), {**windows(512), **OF_MIXED}),
    (mixed(2048, **nested(swa_window_size=None)), {**windows(2048), **OF_MIXED}),
    # use_swa makes all layers slide if layer_types names no sliding one, but not causal.
    ({"layer_types": None, **nested(use_swa=True, swa_window_size=512)}, {"windows": (512,) * 5}),
    ({"sliding_window": 64, **nested(use_swa=True)}, {"windows": (64,) * 5}),
    (mixed(**nested(use_swa=True, swa_window_size=512)), {**windows(512), **OF_MIXED}),
    (nested(use_swa=False, swa_window_size=512), {}),
    # An explicit causality applies to all layers; is_causal comes before dflash_config.causal.
    (nested(causal=True), ALL),
    (nested(causal=False), {}),
    ({"is_causal": False, **nested(causal=True)}, {}),
    ({"is_causal": True, **nested(causal=False)}, ALL),
    (mixed(2048, **nested(causal=False)), windows(2048)),
    (mixed(2048, is_causal=True), {**windows(2048), **ALL}),
    (nested(attention_sink_bias=True), {"attention_sinks": True}),
    ({"add_swa_attention_sink_bias": True}, {"attention_sinks": True}),
    ({"add_swa_attention_sink_bias": True, **nested(attention_sink_bias=False)}, {}),
    (nested(attention_value_scale=0.5), {"value_scale": 0.5}),
    (nested(sample_from_anchor=True), {"sample_from_anchor": True}),
    # Newer configs: block_size inside. Others: all fields outside. In both: inside counts.
    ({"block_size": None, **nested(block_size=10)}, {"block_size": 10}),
    (nested(block_size=10), {"block_size": 10}),
    (nested(block_size=None), {}),
    (
        {"dflash_config": None, "mask_token_id": 7, "target_layer_ids": [0, 3]},
        {"mask_token_id": 7, "taps": (0, 3)},
    ),
    ({"mask_token_id": 7, "target_layer_ids": [0, 3]}, {}),
    ({"mask_token_id": 7, **nested(mask_token_id=None)}, {"mask_token_id": 7}),
    ({"num_target_layers": None, **nested(num_target_layers=40)}, {"num_target_layers": 40}),
    ({"num_target_layers": None}, {"num_target_layers": None}),
    # Read only inside, as vLLM does.
    ({"causal": True, "use_swa": True, "swa_window_size": 9}, {}),
    ({"sample_from_anchor": True, "causal_head": True}, {}),
    (nested(sample_from_anchor=False, causal_head=False, use_aux_hidden_state=True), {}),
    # Left out: derived from others.
    ({"target_hidden_size": 5120}, {"target_hidden_size": 5120}),
    ({"head_dim": None, "num_attention_heads": 16}, {"head_dim": 256, "num_heads": 16}),
    ({"num_key_value_heads": None}, {"num_kv_heads": 32}),
    (
        {"logit_scale": 2.5, "attention_bias": True, "is_neox_style": False},
        {"logit_scale": 2.5, "attention_bias": True, "is_neox_style": False},
    ),
    (
        {"rms_norm_eps": None, "max_position_embeddings": None},
        {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768},
    ),
    ({"architectures": ["Another", "DFlashDraftModel"]}, {}),
    ({"speculators_model_type": None}, {}),
]


@pytest.mark.parametrize(("changes", "means"), MEANINGS)
def test_what_fields_mean(changes: Fields, means: Fields) -> None:
    assert parse_config("it", {**QWEN, **changes}).model_dump() == {**QWEN_SPEC, **means}


def layers(**fields: Any) -> Fields:
    return {"transformer_layer_config": {**SPECULATORS["transformer_layer_config"], **fields}}


SLIDING_ROPE = rope(rope_type="default", rope_theta=9.0)
OF_SPECULATORS: list[tuple[Fields, Fields]] = [
    ({"aux_hidden_state_layer_ids": [1]}, {"taps": (0,)}),
    ({"mask_token_id": 4}, {"mask_token_id": 4}),
    # For sliding layers only: full ones are trained bidirectional (vllm#56692).
    ({"sliding_window_non_causal": False}, {"causal": (True, False, True)}),
    ({"sliding_window_non_causal": True}, {}),
    # Left out or null: the target's. The layers' config is overruled.
    ({"draft_vocab_size": None}, {"draft_vocab_size": 151936}),
    ({"target_hidden_size": None}, {"target_hidden_size": 2048}),
    (layers(block_size=4, draft_vocab_size=5, target_hidden_size=6), {}),
    ({"block_size": None, **layers(block_size=4)}, {"block_size": 4}),
    ({"quantization_config": None}, {}),
    # Where z-lab would write them: ignored here.
    ({"num_hidden_layers": 9, "vocab_size": 9, "hidden_size": 9, "rope_theta": 9}, {}),
    ({"dflash_config": {"mask_token_id": 1, "causal": True}}, {}),
    (layers(architectures=["Qwen3ForCausalLM"]), {}),
    (layers(rope_parameters=None, rope_theta=9.0), SLIDING_ROPE),
    # Layers of both types are trained with the rotation of the target's sliding ones.
    (layers(rope_parameters={FULL: ONE, SLIDING: {"rope_theta": 9.0}}), SLIDING_ROPE),
    (
        layers(rope_parameters={FULL: ONE, SLIDING: {"rope_theta": 9.0}}, layer_types=[FULL] * 3),
        {**SLIDING_ROPE, "windows": (None,) * 3},
    ),
]


@pytest.mark.parametrize(("changes", "means"), OF_SPECULATORS)
def test_what_fields_of_speculators_mean(changes: Fields, means: Fields) -> None:
    spec = parse_config("it", {**SPECULATORS, **changes})
    assert spec.model_dump() == {**SPECULATORS_SPEC, **means}
