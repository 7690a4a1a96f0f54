"""The tensors of a checkpoint, in the layout of section "dialects", and each fault."""

from __future__ import annotations

import pytest

from support.pairs import drafter_config
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

Shapes = dict[str, tuple[int, ...]]

# No two sizes are the same: 3 heads of 10, one for keys and values, 3 taps of width 48.
SPEC = parse_config(
    "it",
    drafter_config(
        hidden_size=32,
        target_hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=10,
        vocab_size=320,
        draft_vocab_size=200,
        dflash_config={"target_layer_ids": [0, 1, 3]},
    ),
)


def layer(number: int) -> Shapes:
    return {
        f"layers.{number}.input_layernorm.weight": (32,),
        f"layers.{number}.post_attention_layernorm.weight": (32,),
        f"layers.{number}.self_attn.q_proj.weight": (30, 32),
        f"layers.{number}.self_attn.k_proj.weight": (10, 32),
        f"layers.{number}.self_attn.v_proj.weight": (10, 32),
        f"layers.{number}.self_attn.o_proj.weight": (32, 30),
        f"layers.{number}.self_attn.q_norm.weight": (10,),
        f"layers.{number}.self_attn.k_norm.weight": (10,),
        f"layers.{number}.mlp.gate_proj.weight": (96, 32),
        f"layers.{number}.mlp.up_proj.weight": (96, 32),
        f"layers.{number}.mlp.down_proj.weight": (32, 96),
    }


PLAIN: Shapes = {
    "fc.weight": (32, 144),
    "hidden_norm.weight": (32,),
    "norm.weight": (32,),
    **layer(0),
    **layer(1),
}
VOCABULARY: Shapes = {
    "embed_tokens.weight": (320, 32),
    "lm_head.weight": (200, 32),
    "d2t": (200,),
    "t2d": (320,),
}
EXTRAS = {
    "attention_bias": {"q_proj.bias": (30,), "k_proj.bias": (10,), "v_proj.bias": (10,)}
    | {"o_proj.bias": (32,)},
    "attention_sink_bias": {"attention_sink_bias": (3,)},
}


def spec_with(**changes: object) -> DrafterSpec:
    fields = {"attention_bias": SPEC.attention_bias, "attention_sinks": False, **changes}
    return DrafterSpec.model_validate({**SPEC.model_dump(), **fields})


def test_what_a_drafter_consists_of() -> None:
    assert expected_tensors(SPEC) == PLAIN
    assert vocabulary_tensors(SPEC) == VOCABULARY
    for field, extra in (
        ("attention_bias", EXTRAS["attention_bias"]),
        ("attention_sinks", EXTRAS["attention_sink_bias"]),
    ):
        added = {f"layers.{i}.self_attn.{name}": of for i in (0, 1) for name, of in extra.items()}
        assert expected_tensors(spec_with(**{field: True})) == PLAIN | added


@pytest.mark.parametrize(
    ("target_hidden_size", "draft_vocab_size", "required"),
    [
        (32, 320, set()),  # uses the target's
        (32, 200, {"lm_head.weight", "d2t"}),
        (48, 320, {"embed_tokens.weight", "lm_head.weight"}),
        (48, 200, {"embed_tokens.weight", "lm_head.weight", "d2t"}),
    ],
)
def test_which_drafters_need_a_vocabulary_of_their_own(
    target_hidden_size: int, draft_vocab_size: int, required: set[str]
) -> None:
    sizes = {"target_hidden_size": target_hidden_size, "draft_vocab_size": draft_vocab_size}
    spec = spec_with(**sizes)
    assert required_vocabulary(spec) == required
    found = {name: Tensor(shape, "BF16") for name, shape in expected_tensors(spec).items()}
    shapes = VOCABULARY | {"lm_head.weight": (draft_vocab_size, 32)}
    missing = [f"missing {name} {list(shapes[name])}" for name in sorted(required)]
    assert tensor_faults(spec, found) == missing


def found(**others: Tensor | None) -> dict[str, Tensor]:
    """Return all tensors of SPEC, with these replaced; None leaves one out."""
    there = {name: Tensor(shape, "BF16") for name, shape in {**PLAIN, **VOCABULARY}.items()}
    there |= {"d2t": Tensor((200,), "I64"), "t2d": Tensor((320,), "BOOL")}
    changed = {**there, **{name.replace("__", "."): of for name, of in others.items()}}
    return {name: tensor for name, tensor in changed.items() if tensor is not None}


def test_a_whole_checkpoint_has_no_faults() -> None:
    assert tensor_faults(SPEC, found()) == []
    assert tensor_faults(SPEC, found(t2d=None)) == []  # nothing here reads it
    check_tensors(SPEC, found())


@pytest.mark.parametrize(
    ("quantization", "name", "is_left_out"),
    [
        (None, "layers.0.self_attn.rotary_emb.inv_freq", True),
        (None, "layers.0.self_attn.k_scale", False),
        ("modelopt", "layers.0.self_attn.k_proj.k_scale", True),
        ("compressed-tensors", "layers.1.self_attn.v_scale", True),
        ("gptq", "layers.1.mlp.down_proj.bias", True),
    ],
)
def test_tensors_that_vllms_loader_drops(
    quantization: str | None, name: str, is_left_out: bool
) -> None:
    spec = spec_with(quantization=quantization)
    one = {name: Tensor((1,), "F32")}
    assert tensor_faults(spec, found() | one) == ([] if is_left_out else [f"surplus {name} [1]"])


def test_a_bias_that_the_config_names_is_loaded() -> None:
    spec = spec_with(attention_bias=True, quantization="gptq")
    assert not spec.leaves_out("layers.0.self_attn.q_proj.bias")
    assert spec.leaves_out("layers.0.mlp.up_proj.bias")
    assert not spec.leaves_out("lilicorr.token_proj.bias")


@pytest.mark.parametrize(
    ("change", "faults"),
    [
        ({"norm__weight": None}, ["missing norm.weight [32]"]),
        ({"d2t": None}, ["missing d2t [200]"]),
        ({"else": Tensor((1, 2), "I8")}, ["surplus else [1, 2]"]),
        (
            {"norm__weight": Tensor((33,), "BF16")},
            ["norm.weight has shape [33], config.json implies [32]"],
        ),
        ({"t2d": Tensor((200,), "BOOL")}, ["t2d has shape [200], config.json implies [320]"]),
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
    with pytest.raises(DrafterError) as refused:
        check_tensors(SPEC, found(**change))
    _, _, listed = str(refused.value).partition("config.json: ")
    said, _, to_do = listed.rpartition(". ")
    assert said == "; ".join(faults)
    is_integer = "stored as" in said
    assert to_do.startswith("Integer weights" if is_integer else "Download the drafter")


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
    found = {name: Tensor(shape, "BF16") for name, shape in expected_tensors(spec).items()}
    del found[f"{LAYER}.weight"]
    there = {f"{LAYER}.{part}": Tensor(*tensor) for part, tensor in WAYS[way].items()}
    assert quantised_parts(spec, found | there) == {f"{LAYER}.weight": {*there}}
    assert tensor_faults(spec, found | there) == []
    assert tensor_faults(spec, found) == [f"missing {LAYER}.weight [96, 64]"]
    plain = parse_config("it", drafter_config())
    assert len(tensor_faults(plain, found | there)) >= len(there)


def test_integers_without_scales_are_no_quantised_weights() -> None:
    spec = parse_config("it", drafter_config(quantization_config={"quant_method": "fp8"}))
    found = {name: Tensor(shape, "BF16") for name, shape in expected_tensors(spec).items()}
    found[f"{LAYER}.weight"] = Tensor((96, 64), "I8")
    (message,) = tensor_faults(spec, found)
    assert message.startswith(f"{LAYER}.weight is stored as I8")


def test_a_norm_is_never_quantised() -> None:
    spec = parse_config("it", drafter_config(quantization_config={"quant_method": "fp8"}))
    found = {name: Tensor(shape, "BF16") for name, shape in expected_tensors(spec).items()}
    found["norm.weight_scale"] = Tensor((1,), "F32")
    assert tensor_faults(spec, found) == ["surplus norm.weight_scale [1]"]


def test_fused_layers_replace_their_parts() -> None:
    there = found()
    parts = [f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up")]
    rows, width = there[parts[0]].shape
    for part in parts:
        del there[part]
    fused = "layers.0.mlp.gate_up_proj.weight"
    assert tensor_faults(SPEC, {**there, fused: Tensor((2 * rows, width), "BF16")}) == []
    (fault,) = tensor_faults(SPEC, {**there, fused: Tensor((rows, width), "BF16")})
    assert fault.startswith(f"{fused} has shape [{rows}, {width}]")


@pytest.mark.parametrize(
    ("name", "is_unread"),
    [
        ("fc.bias", True),
        ("lm_head.bias", True),
        ("layers.1.self_attn.bias", True),  # a buffer
        ("layers.1.mlp.up_proj.bias", True),
        ("mask_embedding", True),
        ("layers.2.mlp.up_proj.bias", False),  # no such layer
        ("other.bias", False),
        ("layers.1.mlp.up_proj.scale", False),
        ("mask_hidden", False),
    ],
)
def test_what_vllms_loader_leaves_out_is_no_fault(name: str, is_unread: bool) -> None:
    spec, one = spec_with(attention_bias=False), {name: Tensor((1,), "F32")}
    there = {name: of for name, of in found().items() if name in expected_tensors(spec)}
    there |= {name: of for name, of in found().items() if name in VOCABULARY}
    assert unread_tensors(spec, {**there, **one}) == ({name} if is_unread else set())
    assert tensor_faults(spec, there | one) == ([] if is_unread else [f"surplus {name} [1]"])


def test_a_bias_that_the_config_names_is_read() -> None:
    spec = spec_with(attention_bias=True)
    assert unread_tensors(spec, {"layers.0.self_attn.q_proj.bias": 1}) == set()


@pytest.mark.parametrize(
    ("short", "prefix"), [("", "model."), ("", "draft.model."), ("embed_tokens", "model.")]
)
def test_a_prefix_is_named(short: str, prefix: str) -> None:
    """vLLM's own DFlash refuses these checkpoints, too."""
    there = {
        f"{prefix}{name}" if name.startswith(short) else name: of for name, of in found().items()
    }
    there.pop(f"{prefix}t2d", None)
    with pytest.raises(DrafterError) as refused:
        check_tensors(SPEC, there)
    count = sum(name.startswith(prefix) for name in there)
    message = str(refused.value)
    assert f"which vLLM does not read either: rename {count} tensor(s), '{prefix}" in message
    if short:
        assert f"'{prefix}embed_tokens.weight' to 'embed_tokens.weight'" in message


def test_surplus_tensors_may_be_removed() -> None:
    surplus, missing = found(rotary__inv_freq=Tensor((8,), "F32")), found(norm__weight=None)
    for there, may_be in ((surplus, True), (missing, False)):
        with pytest.raises(DrafterError) as refused:
            check_tensors(SPEC, there)
        assert ("or remove what is surplus" in str(refused.value)) == may_be
