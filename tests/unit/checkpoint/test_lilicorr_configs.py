"""Configs of LiLiCorr drafters: what is read from them, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from support.pairs import drafter_config, lilicorr_config
from vllm_dflash.checkpoint.architectures import is_drafter
from vllm_dflash.checkpoint.headers import Tensor
from vllm_dflash.checkpoint.read import parse_config
from vllm_dflash.checkpoint.spec import DrafterError, DrafterSpec, LiLiCorr
from vllm_dflash.checkpoint.tensors import expected_tensors, quantised_parts, tensor_faults

LEAST = LiLiCorr(
    candidate_topk=4,
    hidden_size=48,
    num_layers=2,
    num_heads=3,
    mlp_ratio=1.5,
    factor_dim=10,
    vector_eps=1e-6,
    logit_scale=10.0,
)
CONVOLUTIONS = {"conv_kernel_size": 3, "conv_group_size": 8}


def config(**nested: Any) -> dict[str, Any]:
    return drafter_config(**lilicorr_config(dflash_config=nested))


def test_what_is_read() -> None:
    spec = parse_config("it", config())
    assert (spec.lilicorr, spec.dflash2, spec.convolutions) == (LEAST, None, None)
    assert (spec.num_candidates, spec.remarks) == (4, ())
    assert is_drafter(config())
    convolved = parse_config("it", config(**CONVOLUTIONS))
    assert convolved.convolutions == LEAST.model_copy(update=CONVOLUTIONS)
    assert DrafterSpec.model_validate_json(convolved.model_dump_json()) == convolved
    assert parse_config("it", config(conv_kernel_size=0, conv_group_size=0)).convolutions is None


@pytest.mark.parametrize("written", [0, None])
def test_a_head_as_wide_as_the_drafter(written: int | None) -> None:
    spec = parse_config("it", config(lilicorr_hidden_size=written, lilicorr_num_heads=4))
    assert spec.lilicorr is not None
    assert (spec.lilicorr.hidden_size, spec.lilicorr.mlp_size) == (64, 96)
    assert "lilicorr.token_proj.weight" not in expected_tensors(spec)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lilicorr_enabled": False}, "lilicorr_enabled is false"),
        ({"sample_from_anchor": True}, "sample_from_anchor is true, so .* such LiLiCorr drafters"),
        ({"lilicorr_candidate_topk": 3}, "must be a power of two, it is 3"),
        ({"lilicorr_candidate_topk": 32}, "lilicorr_candidate_topk of dflash_config must be"),
        ({"lilicorr_num_layers": None}, "lilicorr_num_layers of dflash_config must be an integer"),
        ({"lilicorr_logit_scale": 0}, "lilicorr_logit_scale of dflash_config must be a positive"),
        ({"lilicorr_num_heads": 5}, r"lilicorr_num_heads \(5\) must divide .*size \(48\)"),
        ({"conv_kernel_size": 3}, "conv_kernel_size is 3 and conv_group_size 0"),
        ({**CONVOLUTIONS, "conv_group_size": 7}, r"conv_group_size \(7\) must divide hidden_size"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(DrafterError, match=words):
        parse_config("it", config(**changes))


@pytest.mark.parametrize("changes", [{"draft_vocab_size": 100}, {"target_hidden_size": 96}])
def test_another_vocabulary_or_size_than_the_targets_is_refused(changes: dict[str, int]) -> None:
    (name,) = changes
    with pytest.raises(DrafterError, match=f"{name} is {changes[name]} and .*must be equal"):
        parse_config("it", config() | changes)


def test_which_of_its_layers_may_be_quantised() -> None:
    spec = parse_config("it", config() | {"quantization_config": {"quant_method": "modelopt"}})
    names = expected_tensors(spec)
    scales = [name.removesuffix("weight") + "weight_scale" for name in names]
    parts = quantised_parts(spec, [*names, *scales])
    of_head = {name.split(".", 1)[1] for name in parts if name.startswith("lilicorr.")}
    inside = {"attn.out_proj", "mlp.up_proj", "mlp.down_proj"}
    layers = {f"layers.{number}.{name}" for number in (0, 1) for name in inside}
    others = {"token_proj", "pass_hidden_proj", "context_proj", "anchor_out_head"}
    others |= {"feature_mlp.up_proj", "feature_mlp.down_proj"}
    assert of_head == {f"{name}.weight" for name in layers | others}


def test_its_tensors_are_named_where_they_are_missing() -> None:
    """Tensors have their current names, even if a checkpoint uses the old ones."""
    spec = parse_config("it", config(**CONVOLUTIONS))
    found = {name: Tensor(shape, "BF16") for name, shape in expected_tensors(spec).items()}
    assert sum("attention_conv" in name for name in found) == 2 * 2
    found["lilicorr.feature_mlp.0.weight"] = found.pop("lilicorr.feature_norm.weight")
    assert tensor_faults(spec, found) == []
    del found["lilicorr.layers.1.attn.in_proj_bias"], found["lilicorr.feature_mlp.0.weight"]
    assert tensor_faults(spec, found) == [
        "missing lilicorr.feature_norm.weight [5]",
        "missing lilicorr.layers.1.attn.in_proj_bias [144]",
    ]
