"""What a config must not say: which field is named, and where the bounds are."""

from __future__ import annotations

from typing import Any

import pytest

from support.configs_by_hand import FULL, QWEN, SLIDING, SPECULATORS, Fields
from vllm_dflash.checkpoint.read import parse_config
from vllm_dflash.checkpoint.spec import DrafterError

MISSING = "config.json says None"
INTEGERS = {  # least and most
    "block_size": (2, 1024),
    "vocab_size": (1, 1 << 31),
    "num_hidden_layers": (1, 1024),
    "num_key_value_heads": (1, 1 << 31),
    "max_position_embeddings": (1, 1 << 22),
}
NEEDED = ("block_size", "hidden_size", "vocab_size", "intermediate_size", "num_hidden_layers")


def refusal(config: Fields) -> str | None:
    try:
        parse_config("it", config)
    except DrafterError as refused:
        message = str(refused)
        assert message.startswith("drafter 'it'")
        assert message.endswith(".")
        return message
    return None


@pytest.mark.parametrize("name", INTEGERS)
def test_bounds_of_integers(name: str) -> None:
    least, most = INTEGERS[name]
    plain = {**QWEN, "layer_types": None, "num_attention_heads": 1, "num_key_value_heads": 1}
    # One key/value head, which divides any number of heads.
    for value in (least, most):
        both = {"num_attention_heads": value} if name == "num_key_value_heads" else {}
        assert refusal({**plain, **both, name: value}) is None
    wrong: tuple[Any, ...] = (least - 1, most + 1, str(least), float(least), True, [least])
    for value in wrong:
        assert refusal({**plain, name: value}) == (
            f"drafter 'it': {name} must be an integer from {least} to {most}, config.json says"
            f" {value!r}."
        )


@pytest.mark.parametrize("name", [*NEEDED, "num_attention_heads"])
def test_what_cannot_be_left_out(name: str) -> None:
    assert f"'it': {name} must be an integer from" in (refusal({**QWEN, name: None}) or "")
    left_out = {key: value for key, value in QWEN.items() if key != name}
    assert (refusal(left_out) or "").endswith(f"{MISSING}.")


def nested(**fields: Any) -> Fields:
    return {"dflash_config": {**QWEN["dflash_config"], **fields}}


def scaled(**fields: Any) -> Fields:
    return {"rope_scaling": fields}


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


# Changes to QWEN, and the words that follow "drafter 'it': ".
REFUSED: list[tuple[Fields, str]] = [
    ({"dflash_config": [1]}, "dflash_config must be an object, config.json says [1]"),
    ({"dflash_config": None}, "mask_token_id must be an integer from 0 to 2147483648, "),
    (nested(mask_token_id=-1), "mask_token_id must be an integer from 0"),
    (nested(target_layer_ids=[]), "target_layer_ids must be a list of 1 to 1024 layer numbers"),
    (nested(target_layer_ids=[-1, 2]), "target_layer_ids must be a list of 1 to 1024"),
    (nested(target_layer_ids=[2, 2]), "target_layer_ids must be strictly ascending"),
    (nested(causal=1), "causal must be true or false, config.json says 1"),
    (nested(use_swa="yes"), "use_swa must be true or false"),
    (nested(use_swa=True), "a sliding layer needs dflash_config.swa_window_size or sliding_window"),
    (nested(use_swa=True, swa_window_size=0), "a sliding layer needs "),
    ({"layer_types": [FULL] * 4 + [SLIDING]}, "a sliding layer needs "),
    (nested(attention_sink_bias="no"), "attention_sink_bias must be true or false"),
    (nested(attention_value_scale=0), "attention_value_scale must be a positive number"),
    (nested(sample_from_anchor=1), "sample_from_anchor must be true or false, config.json says 1"),
    (nested(sample_from_anchor=True, causal_head=True), "causal_head is true, so it is a JetSpec"),
    (nested(causal_head=True), "causal_head is true, so it is a JetSpec drafter"),
    (nested(use_aux_hidden_state=False), "use_aux_hidden_state is false, so"),
    ({"use_aux_hidden_state": False}, "use_aux_hidden_state is false, so"),
    ({"quantization_config": {"bits": 4}}, "quantization_config must name its quant_method"),
    ({"is_neox_style": 0}, "is_neox_style must be true or false"),
    ({"logit_scale": -1.0}, "logit_scale must be a positive number"),
    ({"rms_norm_eps": 0}, "rms_norm_eps must be a positive number"),
    ({"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
    ({"layer_types": [FULL] * 4}, "layer_types names 4 layers, num_hidden_layers is 5"),
    ({"layer_types": ["chunked"] * 5}, "layer_types must be a list of"),
    ({"num_key_value_heads": 5}, "num_attention_heads (32) must be a multiple of num_key_value_"),
    ({"head_dim": 127}, "head_dim must be even to be rotated, it is 127"),
    (
        {"num_attention_heads": 8192, "head_dim": None},
        "head_dim must be even to be rotated, it is 0",
    ),
    ({"model_type": ""}, "model_type must be the name of a model type"),
    ({"dtype": 16}, "dtype must be a type's name"),
    # Rotation.
    ({"rope_theta": 0}, "rope_theta of rope_theta must be a positive number"),
    ({"rope_scaling": "yarn"}, "rope_scaling must be an object, config.json says 'yarn'"),
    ({"rope_parameters": [1]}, "rope_parameters must be an object, config.json says [1]"),
    (scaled(type="longrope", factor=2), "rope_type of rope_scaling must be default, linear,"),
    (scaled(type="linear"), "rope_type linear needs factor"),
    *(
        (scaled(**LLAMA3 | {name: None}), f"rope_type llama3 needs {name}")
        for name in LLAMA3
        if name != "rope_type"
    ),
    (scaled(**LLAMA3 | {"low_freq_factor": -1}), "low_freq_factor of rope_scaling must be a pos"),
    (scaled(type="yarn", factor=2, mscale=-1), "mscale of rope_scaling must be a number from 0"),
    (scaled(type="yarn", factor=2, beta_fast=0), "beta_fast of rope_scaling must be a positive"),
    (scaled(type="default", rope_dim=64), "rope_dim of rope_scaling must be left out"),
    (scaled(type="default", partial_rotary_factor=1.5), "partial_rotary_factor of rope_scaling"),
    (
        scaled(type="default", partial_rotary_factor=0.001),
        "partial_rotary_factor of rope_scaling (0.001) rotates 0 of the 128 numbers of a head",
    ),
    (
        scaled(type="default", partial_rotary_factor=0.06),
        "partial_rotary_factor of rope_scaling (0.06) rotates 7 of the 128 numbers of a head",
    ),
    (
        {"partial_rotary_factor": 0.03},
        "partial_rotary_factor of rope_theta (0.03) rotates 3 of the 128 numbers of a head",
    ),
    ({"partial_rotary_factor": 2.0}, "partial_rotary_factor of rope_theta must be at most 1"),
    # By layer type: those of the types in use must be equal.
    (
        scaled(sliding_attention={"rope_theta": 2.0}),
        "rope_scaling differs by layer type (sliding_attention), and drafters whose layers are"
        " rotated differently are not supported. Write the rotation that this one was trained with"
        ' as "rope_scaling" in "drafter_overrides"',
    ),
    (
        {
            **scaled(full_attention={"rope_theta": 1.0}, sliding_attention={"rope_theta": 2.0}),
            "layer_types": [FULL, FULL, SLIDING, FULL, FULL],
            "sliding_window": 8,
        },
        "rope_scaling differs by layer type (full_attention, sliding_attention), and drafters",
    ),
    (
        scaled(main={"rope_theta": 1.0}, compress={"rope_theta": 2.0}),
        "rope_scaling differs by layer type (main, compress), and drafters",
    ),
    (
        scaled(full_attention={"rope_theta": -1.0}),
        "rope_theta of rope_scaling must be a positive number",
    ),
    # A table of 40,960 or 65,536 rows may be stretched to at most 4,194,304.
    (
        scaled(type="linear", factor=103),
        "factor of rope_scaling stretches the positions to 4218880",
    ),
    (scaled(type="linear", factor=2e-5), "factor of rope_scaling stretches the positions to 1, "),
    (
        scaled(type="yarn", factor=65, original_max_position_embeddings=65536),
        "factor of rope_scaling stretches the positions to 4259840",
    ),
    (scaled(type="yarn", factor=103), "factor of rope_scaling stretches the positions to 4218880"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_what_is_refused(changes: Fields, words: str) -> None:
    message = refusal({**QWEN, **changes})
    assert message is not None
    assert message.startswith(f"drafter 'it': {words}"), message


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": 2},
        {"head_dim": 2, "num_attention_heads": 1, "num_key_value_heads": 1},
        nested(target_layer_ids=list(range(1024))),
        nested(mask_token_id=1 << 31),
        nested(use_swa=True, swa_window_size=1),
        nested(use_swa=True, swa_window_size=(1 << 31) - 1),
        # Unused, so harmless, where no layer slides.
        {"sliding_window": "wide"},
        nested(swa_window_size=0),
        scaled(type="linear", factor=102.4),
        scaled(type="linear", factor=1 / 40960),
        scaled(type="yarn", factor=64, original_max_position_embeddings=65536),
        scaled(type="yarn", factor=1e-4, original_max_position_embeddings=10000),
        scaled(type="yarn", factor=1.5, mscale=0, mscale_all_dim=0),
        scaled(type="default", partial_rotary_factor=1),
        # Llama's table has one row per position of the drafter, however it is stretched.
        scaled(**LLAMA3 | {"factor": 1e6}),
    ],
)
def test_what_is_just_allowed(changes: Fields) -> None:
    assert refusal({**QWEN, **changes}) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"speculators_model_type": "eagle3"}, "speculators_model_type is 'eagle3', expected 'dfl"),
        ({"speculators_model_type": "dspark"}, "'dflash2'; method \"dspark\" runs those."),
        ({"speculators_model_type": ["dflash2"]}, "type is ['dflash2'], expected 'dflash' or"),
        ({"transformer_layer_config": None}, "transformer_layer_config must be an object"),
        ({"aux_hidden_state_layer_ids": [0, 2]}, "aux_hidden_state_layer_ids must be a list"),
        ({"aux_hidden_state_layer_ids": [3, 2]}, "target_layer_ids must be strictly ascending"),
        ({"quantization_config": {"format": "int8"}}, "quantization_config must name its"),
    ],
)
def test_what_is_refused_of_speculators(changes: Fields, words: str) -> None:
    assert words in (refusal({**SPECULATORS, **changes}) or "")


@pytest.mark.parametrize(
    ("architectures", "words"),
    [
        (None, "is not a DFlash checkpoint that can be read: config.json has architectures []"),
        (["Qwen3ForCausalLM"], "has architectures ['Qwen3ForCausalLM'], expected"),
        (["Qwen3DSparkModel"], "is a DSpark checkpoint (architectures ['Qwen3DSparkModel'])"),
    ],
)
def test_what_is_no_dflash_drafter(architectures: Any, words: str) -> None:
    message = refusal({**QWEN, "architectures": architectures}) or ""
    assert message.startswith("drafter 'it': it is")
    assert words in message
