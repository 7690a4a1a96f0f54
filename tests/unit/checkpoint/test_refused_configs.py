"""What a config must not say, and which field the message names."""

from __future__ import annotations

from typing import Any

import pytest

from support.configs_by_hand import FULL, LLAMA3, QWEN, SLIDING, SPECULATORS, Fields, nested
from vllm_dflash.checkpoint.read import parse_config
from vllm_dflash.checkpoint.spec import DrafterError


def refusal(config: Fields) -> str | None:
    """Return what follows "drafter 'it': ", if the config is refused."""
    try:
        parse_config("it", config)
    except DrafterError as refused:
        start, _, message = str(refused).partition("drafter 'it': ")
        assert not start
        assert message.endswith(".")
        return message
    return None


def scaled(**fields: Any) -> Fields:
    return {"rope_scaling": fields}


REFUSED: list[tuple[Fields, str]] = [
    ({"num_attention_heads": None}, "num_attention_heads must be an integer from"),
    ({"block_size": 1}, "block_size must be an integer from 2 to 1024, config.json says 1."),
    ({"dflash_config": [1]}, "dflash_config must be an object, config.json says [1]"),
    ({"dflash_config": None}, "mask_token_id must be an integer from 0 to 2147483648, "),
    (nested(target_layer_ids=[2, 2]), "target_layer_ids must be strictly ascending"),
    (nested(use_swa=True), "a sliding layer needs dflash_config.swa_window_size or sliding_window"),
    (nested(use_swa=True, swa_window_size=0), "a sliding layer needs "),
    ({"layer_types": [FULL] * 4 + [SLIDING]}, "a sliding layer needs "),
    (nested(sample_from_anchor=True, causal_head=True), "causal_head is true, so it is a JetSpec"),
    (nested(use_aux_hidden_state=False), "use_aux_hidden_state is false, so"),
    # Also if taps are missing.
    (nested(use_aux_hidden_state=False, target_layer_ids=None), "use_aux_hidden_state is false,"),
    ({"use_aux_hidden_state": False}, "use_aux_hidden_state is false, so"),
    ({"quantization_config": {"bits": 4}}, "quantization_config must name its quant_method"),
    ({"layer_types": [FULL] * 4}, "layer_types names 4 layers, num_hidden_layers is 5"),
    ({"layer_types": ["chunked"] * 5}, "layer_types must be a list of"),
    ({"num_key_value_heads": 5}, "num_attention_heads (32) must be a multiple of num_key_value_"),
    ({"head_dim": 127}, "head_dim must be even to be rotated, it is 127"),
    ({"num_attention_heads": 8192, "head_dim": None}, "head_dim must be even to be rotated, it is"),
    # Rotation.
    ({"rope_scaling": "yarn"}, "rope_scaling must be an object, config.json says 'yarn'"),
    (scaled(type="longrope", factor=2), "rope_type of rope_scaling must be default, linear,"),
    (scaled(type="linear"), "rope_type linear needs factor"),
    *(
        (scaled(**LLAMA3 | {name: None}), f"rope_type llama3 needs {name}")
        for name in LLAMA3
        if name != "rope_type"
    ),
    (
        scaled(type="default", partial_rotary_factor=0.001),
        "partial_rotary_factor of rope_scaling (0.001) rotates 0 of the 128 numbers of a head",
    ),
    (
        {"partial_rotary_factor": 0.03},
        "partial_rotary_factor of rope_theta (0.03) rotates 3 of the 128 numbers of a head",
    ),
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
        scaled(full_attention={"rope_theta": -1.0}),
        "rope_theta of rope_scaling must be a positive number",
    ),
    # A table of 40,960 or 65,536 rows may be stretched to at most 4,194,304.
    (scaled(type="linear", factor=103), "factor of rope_scaling stretches the positions to 421888"),
    (scaled(type="linear", factor=2e-5), "factor of rope_scaling stretches the positions to 1, "),
    (
        scaled(type="yarn", factor=65, original_max_position_embeddings=65536),
        "factor of rope_scaling stretches the positions to 4259840",
    ),
    (scaled(type="yarn", factor=103), "factor of rope_scaling stretches the positions to 4218880"),
    # Other kinds of drafters.
    ({"architectures": None}, "it is not a DFlash checkpoint that can be read: config.json has ar"),
    (
        {"architectures": ["Qwen3DSparkModel"]},
        "it is a DSpark checkpoint (architectures ['Qwen3DSparkModel'])",
    ),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_what_is_refused(changes: Fields, words: str) -> None:
    message = refusal({**QWEN, **changes})
    assert message is not None
    assert message.startswith(words), message


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": 2, "num_attention_heads": 1, "num_key_value_heads": 1},
        nested(use_swa=True, swa_window_size=1),
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
