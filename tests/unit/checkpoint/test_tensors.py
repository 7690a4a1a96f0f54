"""The tensors of a checkpoint, as the layout of section "dialects" has them, and what is wrong."""

from __future__ import annotations

import pytest

from support.pairs import drafter_config
from vllm_dflash.checkpoint.headers import Tensor
from vllm_dflash.checkpoint.read import parse_config
from vllm_dflash.checkpoint.spec import DrafterError, DrafterSpec
from vllm_dflash.checkpoint.tensors import (
    TensorFaults,
    check_tensors,
    compare_tensors,
    expected_tensors,
    quantised_parts,
    required_vocabulary,
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
        (32, 320, set()),  # the target's serve
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
    assert compare_tensors(spec, found).missing == {name: VOCABULARY[name] for name in required} | (
        {"lm_head.weight": (draft_vocab_size, 32)} if "lm_head.weight" in required else {}
    )


def found(**others: Tensor | None) -> dict[str, Tensor]:
    """All that there must be, and these instead; None: left out."""
    there = {name: Tensor(shape, "BF16") for name, shape in {**PLAIN, **VOCABULARY}.items()}
    there |= {"d2t": Tensor((200,), "I64"), "t2d": Tensor((320,), "BOOL")}
    changed = {**there, **{name.replace("__", "."): of for name, of in others.items()}}
    return {name: tensor for name, tensor in changed.items() if tensor is not None}


NO_FAULTS = TensorFaults({}, {}, {}, {})


def test_a_whole_checkpoint_has_no_faults() -> None:
    assert compare_tensors(SPEC, found()) == NO_FAULTS
    assert compare_tensors(SPEC, found(t2d=None)) == NO_FAULTS  # nothing here reads it
    check_tensors(SPEC, found())


@pytest.mark.parametrize(
    ("change", "faults"),
    [
        ({"norm__weight": None}, TensorFaults({"norm.weight": (32,)}, {}, {}, {})),
        ({"d2t": None}, TensorFaults({"d2t": (200,)}, {}, {}, {})),
        ({"else": Tensor((1, 2), "I8")}, TensorFaults({}, {"else": (1, 2)}, {}, {})),
        (
            {"norm__weight": Tensor((33,), "BF16")},
            TensorFaults({}, {}, {"norm.weight": ((33,), (32,))}, {}),
        ),
        (
            {"t2d": Tensor((200,), "BOOL")},
            TensorFaults({}, {}, {"t2d": ((200,), (320,))}, {}),
        ),
        (
            {
                "fc__weight": Tensor((32, 144), "I8"),
                "lm_head__weight": Tensor((200, 32), "F8_E4M3"),
            },
            TensorFaults({}, {}, {}, {"fc.weight": "I8"}),
        ),
        (
            {"norm__weight": Tensor((9,), "U8"), "fc__weight": None, "b": Tensor((), "F32")},
            TensorFaults(
                {"fc.weight": (32, 144)},
                {"b": ()},
                {"norm.weight": ((9,), (32,))},
                {"norm.weight": "U8"},
            ),
        ),
    ],
)
def test_each_fault_by_name(change: dict[str, Tensor | None], faults: TensorFaults) -> None:
    assert compare_tensors(SPEC, found(**change)) == faults
    with pytest.raises(DrafterError) as refused:
        check_tensors(SPEC, found(**change))
    _, _, listed = str(refused.value).partition("config.json: ")
    said, _, to_do = listed.rpartition(". ")
    assert said == "; ".join(faults.messages())
    assert to_do.startswith("Weights of integers" if faults.integers else "Download the drafter")


def test_one_sentence_each() -> None:
    faults = TensorFaults({"a": (1, 2)}, {"b": (3,)}, {"c": ((4,), (5,))}, {"d": "I8"}).messages()
    assert faults[:3] == [
        "missing a [1, 2]",
        "surplus b [3]",
        "c has shape [4], config.json implies [5]",
    ]
    assert faults[3] == "d is stored as I8: what is not quantised must be floating-point numbers"
    assert len(faults) == 4


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
    "fp8": {"weight": ((96, 32), "F8_E4M3"), "weight_scale": ((1,), "F32")},
    "packed": {"weight_packed": ((96, 4), "I32"), "weight_scale": ((96, 1), "BF16")},
    "awq": {
        "qweight": ((32, 12), "I32"),
        "qzeros": ((1, 12), "I32"),
        "scales": ((1, 96), "F16"),
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_quantised_has_other_tensors(way: str) -> None:
    """Which only vLLM's layer of that method can judge; all else is as it was."""
    spec = parse_config("it", drafter_config(quantization_config={"quant_method": way}))
    found = {name: Tensor(shape, "BF16") for name, shape in expected_tensors(spec).items()}
    del found[f"{LAYER}.weight"]
    there = {f"{LAYER}.{part}": Tensor(*tensor) for part, tensor in WAYS[way].items()}
    assert quantised_parts(spec, found | there) == {f"{LAYER}.weight": {*there}}
    assert compare_tensors(spec, found | there).messages() == []
    assert compare_tensors(spec, found).messages() == [f"missing {LAYER}.weight [96, 64]"]
    plain = parse_config("it", drafter_config())
    assert len(compare_tensors(plain, found | there).messages()) >= len(there)


def test_integers_without_scales_are_no_quantised_weights() -> None:
    spec = parse_config("it", drafter_config(quantization_config={"quant_method": "fp8"}))
    found = {name: Tensor(shape, "BF16") for name, shape in expected_tensors(spec).items()}
    found[f"{LAYER}.weight"] = Tensor((96, 64), "I8")
    (message,) = compare_tensors(spec, found).messages()
    assert message.startswith(f"{LAYER}.weight is stored as I8")


def test_a_norm_is_never_quantised() -> None:
    spec = parse_config("it", drafter_config(quantization_config={"quant_method": "fp8"}))
    found = {name: Tensor(shape, "BF16") for name, shape in expected_tensors(spec).items()}
    found["norm.weight_scale"] = Tensor((1,), "F32")
    assert compare_tensors(spec, found).messages() == ["surplus norm.weight_scale [1]"]
