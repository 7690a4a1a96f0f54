"""The tensors that a checkpoint must have are those of the reference; each fault is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from reference.reference_drafter import ReferenceDrafter
from support.pairs import dflash2_config, drafter_config, lilicorr_config
from vllm_dflash.checkpoint.headers import Tensor
from vllm_dflash.checkpoint.read import parse_config
from vllm_dflash.checkpoint.spec import DrafterError, DrafterSpec
from vllm_dflash.checkpoint.tensors import (
    check_tensors,
    expected_tensors,
    quantised_parts,
    required_vocabulary,
    tensor_faults,
    unread_tensors,
    vocabulary_tensors,
)

# No two sizes are the same: 3 heads of 10, one for keys and values, 3 taps of width 48.
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "target_hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 10,
    "draft_vocab_size": 200,
    "dflash_config": {"target_layer_ids": [0, 1, 3]},
}
SPEC = parse_config("it", drafter_config(**SIZES))
CONVOLUTIONS = {"conv_kernel_size": 3, "conv_group_size": 8}
KINDS: dict[str, dict[str, Any]] = {
    "dflash": SIZES,
    "biases": {**SIZES, "attention_bias": True},
    "sinks": {"dflash_config": {"attention_sink_bias": True}},
    "dflash2": dflash2_config(),
    "lilicorr": lilicorr_config(),
    "lilicorr-convolutions": lilicorr_config(dflash_config=CONVOLUTIONS),
    "lilicorr-as-wide-as-the-drafter": lilicorr_config(
        dflash_config={"lilicorr_hidden_size": 0, "lilicorr_num_heads": 4}
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_shapes_are_those_of_the_reference(kind: str) -> None:
    spec = parse_config("it", drafter_config(**KINDS[kind]))
    with torch.device("meta"):
        reference = ReferenceDrafter(spec)
    shapes = {name: tuple(one.shape) for name, one in reference.named_parameters()}
    assert expected_tensors(spec) == shapes


def spec_with(**changes: object) -> DrafterSpec:
    return SPEC.model_copy(update=changes)


def floats(spec: DrafterSpec) -> dict[str, Tensor]:
    """Return the tensors of a drafter without a vocabulary of its own."""
    return {name: Tensor(shape, "BF16") for name, shape in expected_tensors(spec).items()}


def found(**others: Tensor | None) -> dict[str, Tensor]:
    """Return all tensors of SPEC, with these replaced; None leaves one out."""
    own = {name: Tensor(shape, "BF16") for name, shape in vocabulary_tensors(SPEC).items()}
    own |= {"d2t": Tensor((200,), "I64"), "t2d": Tensor((320,), "BOOL")}
    changed = {name.replace("__", "."): tensor for name, tensor in others.items()}
    there = {**floats(SPEC), **own, **changed}
    return {name: tensor for name, tensor in there.items() if tensor is not None}


@pytest.mark.parametrize(
    ("target_hidden_size", "draft_vocab_size", "required"),
    [
        (32, 320, []),  # uses the target's
        (32, 200, ["d2t [200]", "lm_head.weight [200, 32]"]),
        (48, 320, ["embed_tokens.weight [320, 32]", "lm_head.weight [320, 32]"]),
        (48, 200, ["d2t [200]", "embed_tokens.weight [320, 32]", "lm_head.weight [200, 32]"]),
    ],
)
def test_which_drafters_need_a_vocabulary_of_their_own(
    target_hidden_size: int, draft_vocab_size: int, required: list[str]
) -> None:
    sizes = {"target_hidden_size": target_hidden_size, "draft_vocab_size": draft_vocab_size}
    spec = spec_with(**sizes)
    assert required_vocabulary(spec) == {text.split()[0] for text in required}
    assert tensor_faults(spec, floats(spec)) == [f"missing {text}" for text in required]


@pytest.mark.parametrize(
    ("quantization", "name", "is_left_out"),
    [
        (None, "layers.0.self_attn.rotary_emb.inv_freq", True),
        (None, "layers.0.self_attn.k_scale", False),
        ("modelopt", "layers.0.self_attn.k_proj.k_scale", True),
        ("compressed-tensors", "layers.1.self_attn.v_scale", True),
        ("gptq", "layers.1.mlp.down_proj.bias", True),
        # Biases that the config does not name, buffers, and a mask embedding in this file.
        (None, "fc.bias", True),
        (None, "lm_head.bias", True),
        (None, "layers.1.self_attn.bias", True),
        (None, "mask_embedding", True),
        (None, "layers.2.mlp.up_proj.bias", False),  # no such layer
        (None, "layers.1.mlp.up_proj.scale", False),
        (None, "other.bias", False),
        (None, "mask_hidden", False),
    ],
)
def test_tensors_that_vllms_loader_drops(
    quantization: str | None, name: str, is_left_out: bool
) -> None:
    spec, one = spec_with(quantization=quantization), {name: Tensor((1,), "F32")}
    assert tensor_faults(spec, found() | one) == ([] if is_left_out else [f"surplus {name} [1]"])
    if quantization is None:  # the log names those that a drafter may have been trained with
        is_unread = is_left_out and not spec.leaves_out(name)
        assert unread_tensors(spec, found() | one) == ({name} if is_unread else set())


def test_a_bias_that_the_config_names_is_loaded() -> None:
    spec = spec_with(attention_bias=True, quantization="gptq")
    assert not spec.leaves_out("layers.0.self_attn.q_proj.bias")
    assert spec.leaves_out("layers.0.mlp.up_proj.bias")
    assert not spec.leaves_out("lilicorr.token_proj.bias")
    assert unread_tensors(spec, {"layers.0.self_attn.q_proj.bias": 1}) == set()


@pytest.mark.parametrize(
    ("change", "faults"),
    [
        ({}, []),
        ({"t2d": None}, []),  # nothing here reads it
        ({"norm__weight": None}, ["missing norm.weight [32]"]),
        ({"d2t": None}, ["missing d2t [200]"]),
        ({"else": Tensor((1, 2), "I8")}, ["surplus else [1, 2]"]),
        ({"t2d": Tensor((200,), "BOOL")}, []),
        (
            {
                "fc__weight": Tensor((32, 144), "I8"),
                "lm_head__weight": Tensor((200, 32), "F8_E4M3"),
            },
            ["fc.weight is stored as I8"],
        ),
        (
            {"norm__weight": Tensor((9,), "U8"), "fc__weight": None, "b": Tensor((), "F32")},
            [
                "missing fc.weight [32, 144]",
                "surplus b []",
                "norm.weight has shape [9], config.json implies [32]",
                "norm.weight is stored as U8",
            ],
        ),
    ],
)
def test_each_fault_by_name(change: dict[str, Tensor | None], faults: list[str]) -> None:
    reason = ": unquantised tensors must be floating-point"
    faults = [fault + reason * ("stored as" in fault) for fault in faults]
    assert tensor_faults(SPEC, found(**change)) == faults
    if not faults:
        check_tensors(SPEC, found(**change))
        return
    with pytest.raises(DrafterError) as refused:
        check_tensors(SPEC, found(**change))
    _, _, listed = str(refused.value).partition("config.json: ")
    said, _, remedy = listed.rpartition(". ")
    assert said == "; ".join(faults)
    assert remedy.startswith("Integer weights" if "stored as" in said else "Download the drafter")
    is_only_surplus = all(fault.startswith("surplus") for fault in faults)
    assert ("or remove what is surplus" in remedy) == is_only_surplus


@pytest.mark.parametrize(("surplus", "named", "rest"), [(40, 40, ""), (43, 40, "; and 3 more")])
def test_a_refusal_names_forty_at_most(surplus: int, named: int, rest: str) -> None:
    others = {f"x{number:02}": Tensor((1,), "F32") for number in range(surplus)}
    with pytest.raises(DrafterError) as refused:
        check_tensors(SPEC, {**found(), **others})
    message = str(refused.value)
    assert message.count("surplus x") == named
    assert f"surplus x39 [1]{rest}. Download" in message


LAYER = "layers.1.mlp.up_proj"
WAYS: dict[str, dict[str, tuple[tuple[int, ...], str]]] = {
    "int8": {"weight": ((96, 32), "I8"), "weight_scale": ((96, 1), "F32")},
    "packed": {"weight_packed": ((96, 4), "I32"), "weight_scale": ((96, 1), "BF16")},
    "awq": {"qweight": ((32, 12), "I32"), "qzeros": ((1, 12), "I32"), "scales": ((1, 96), "F16")},
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_quantised_has_other_tensors(way: str) -> None:
    """Only vLLM's layer of that method can check them; all other tensors are unchanged."""
    spec = parse_config("it", drafter_config(quantization_config={"quant_method": way}))
    found = floats(spec)
    del found[f"{LAYER}.weight"]
    there = {f"{LAYER}.{part}": Tensor(*tensor) for part, tensor in WAYS[way].items()}
    assert quantised_parts(spec, found | there) == {f"{LAYER}.weight": {*there}}
    assert tensor_faults(spec, found | there) == []
    assert tensor_faults(spec, found) == [f"missing {LAYER}.weight [96, 64]"]
    plain = spec.model_copy(update={"quantization": None})
    assert len(tensor_faults(plain, found | there)) >= len(there)


def test_what_is_not_quantised_is_checked_in_a_quantised_drafter() -> None:
    """Integers without scales are no quantised weights, and norms are never quantised."""
    spec = parse_config("it", drafter_config(quantization_config={"quant_method": "fp8"}))
    integers = floats(spec) | {f"{LAYER}.weight": Tensor((96, 64), "I8")}
    (message,) = tensor_faults(spec, integers)
    assert message.startswith(f"{LAYER}.weight is stored as I8")
    scaled = floats(spec) | {"norm.weight_scale": Tensor((1,), "F32")}
    assert tensor_faults(spec, scaled) == ["surplus norm.weight_scale [1]"]


def test_which_layers_of_lilicorrs_head_may_be_quantised() -> None:
    config = drafter_config(**lilicorr_config(), quantization_config={"quant_method": "modelopt"})
    spec = parse_config("it", config)
    names = expected_tensors(spec)
    scales = [name.removesuffix("weight") + "weight_scale" for name in names]
    parts = quantised_parts(spec, [*names, *scales])
    of_head = {name.split(".", 1)[1] for name in parts if name.startswith("lilicorr.")}
    inside = {"attn.out_proj", "mlp.up_proj", "mlp.down_proj"}
    layers = {f"layers.{number}.{name}" for number in (0, 1) for name in inside}
    others = {"token_proj", "pass_hidden_proj", "context_proj", "anchor_out_head"}
    others |= {"feature_mlp.up_proj", "feature_mlp.down_proj"}
    assert of_head == {f"{name}.weight" for name in layers | others}


def test_fused_layers_replace_their_parts() -> None:
    parts = [f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up")]
    there = {name: tensor for name, tensor in found().items() if name not in parts}
    fused = "layers.0.mlp.gate_up_proj.weight"
    assert tensor_faults(SPEC, {**there, fused: Tensor((192, 32), "BF16")}) == []
    (fault,) = tensor_faults(SPEC, {**there, fused: Tensor((96, 32), "BF16")})
    assert fault.startswith(f"{fused} has shape [96, 32]")


@pytest.mark.parametrize(
    ("kind", "other", "ours"),
    [
        ("dflash", "midlayer.input_layernorm.weight", "layers.0.input_layernorm.weight [32]"),
        ("dflash", "encoder.fc.weight", "fc.weight [32, 144]"),
        ("dflash", "encoder.output_norm_enc.weight", "hidden_norm.weight [32]"),
        ("dflash", "model.norm.weight", "norm.weight [32]"),
        ("lilicorr", "lilicorr.feature_mlp.0.weight", "lilicorr.feature_norm.weight [5]"),
    ],
)
def test_other_names_are_read_and_ours_are_told(kind: str, other: str, ours: str) -> None:
    spec, there = SPEC, found()
    if kind == "lilicorr":
        spec = parse_config("it", drafter_config(**lilicorr_config()))
        there = floats(spec)
    there[other] = there.pop(ours.split()[0])
    assert tensor_faults(spec, there) == []
    del there[other]
    assert tensor_faults(spec, there) == [f"missing {ours}"]


def test_a_tensor_under_two_names_is_refused() -> None:
    twice = found(model__norm__weight=Tensor((32,), "BF16"))
    both = ("norm.weight", "model.norm.weight")
    for there, (one, other) in ((twice, both), (dict(reversed(twice.items())), both[::-1])):
        with pytest.raises(DrafterError, match=f"'it': .* twice, as {one} and as {other}\\. Down"):
            check_tensors(SPEC, there)


LENGTH_HEAD = {
    "thresh_head_two_model.down.weight": Tensor((256, 128), "BF16"),
    "thresh_head_two_model.down.bias": Tensor((256,), "BF16"),
}


def test_length_heads_are_surplus_unless_the_config_names_them() -> None:
    spec = spec_with(length_heads=("thresh_head_two_model",))
    assert tensor_faults(spec, found() | LENGTH_HEAD) == []
    for other in ((), ("prob_head",)):
        faults = tensor_faults(spec_with(length_heads=other), found() | LENGTH_HEAD)
        assert "surplus thresh_head_two_model.down.bias [256]" in faults
