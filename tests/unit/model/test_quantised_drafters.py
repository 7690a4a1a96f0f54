"""Quantised drafters on vLLM's CPU kernels, against the values that their weights stand for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from support.cached_drafter import Row, features_of
from support.drafter_harness import ProposerHarness
from support.pairs import Pair, dflash2_config, lilicorr_config, make_pair
from support.quantised import OF_THE_HEAD, WAYS, quantise
from support.reference_decoding import block_states
from vllm_dflash.checkpoint.read import read_drafter

WITHOUT = {
    "int8": (torch.cpu._is_vnni_supported, "oneDNN's kernel for W8A8 saturates without VNNI"),
    "int4": (torch.cpu._is_avx512_supported, "vLLM for AVX2 has no kernel for W4A16"),
}
"""What a CPU may lack (docs/checkpoints.md); FP8 is unpacked on any CPU."""

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "biases": {"attention_bias": True},
    "value-scale": {"dflash_config": {"attention_value_scale": 0.7}},
    "dflash2": dflash2_config(dflash_config={"conv_group_size": 4}),  # AMX needs at least 32 rows
    "lilicorr": lilicorr_config(
        dflash_config={
            "lilicorr_hidden_size": 32,
            "lilicorr_num_heads": 4,
            "lilicorr_mlp_ratio": 2.0,
        }
    ),
}
FIRST_LAYER = tuple(f"layers.0.self_attn.{part}_proj" for part in "qkv")
WHOLE: dict[str, tuple[str, ...]] = {"all": (), "fc": ("fc",), "a-layer": FIRST_LAYER}
ROUNDING = {"int8": 0.08, "fp8": 0.25, "int4": 0.08}
"""Bounds of the error, relative to the hidden states. Each layer's inputs are rounded to 8 bits if
the way does so, and everything is rounded to bfloat16, which vLLM's AMX kernels take."""
ALONE = {
    "o": ("layers.0.self_attn.o_proj",),
    "down": ("layers.1.mlp.down_proj",),
    "gate and up": ("layers.1.mlp.gate_proj", "layers.1.mlp.up_proj"),
    "last layer's q, k, v": tuple(name.replace("0", "1") for name in FIRST_LAYER),
}
"""One projection of one layer, as fused in our model."""
LEFT_OUT = WHOLE | ALONE
CASES = [
    *(("int8", shape, left_out) for shape in SHAPES for left_out in WHOLE),
    *((way, "qwen3", left_out) for way in WAYS if way != "int8" for left_out in WHOLE),
    *(("int8", "qwen3", left_out) for left_out in ALONE),
]


@pytest.mark.parametrize(("way", "shape", "left_out"), CASES)
def test_hidden_states_are_those_of_the_weights_they_stand_for(
    tmp_path: Path, way: str, shape: str, left_out: str
) -> None:
    is_there, what_else = WITHOUT.get(way, (lambda: True, ""))
    if not is_there():
        pytest.skip(what_else)
    plain = make_pair(tmp_path, **SHAPES[shape])
    quantised, meant = tmp_path / "quantised", tmp_path / "meant"
    out = (*LEFT_OUT[left_out], *(OF_THE_HEAD if shape == "lilicorr" else ()))
    tensors = quantise(plain.drafter, quantised, way, left_out=out)
    meant.mkdir()
    save_file(tensors, meant / "model.safetensors")
    pair = Pair(plain.target, quantised, read_drafter(str(quantised)))
    assert pair.spec.quantization == "compressed-tensors"
    harness = ProposerHarness(pair, dtype="bfloat16")
    assert any("scale" in name for name, _ in harness.proposer.model.named_parameters())
    features = features_of(pair, 45, seed=1)
    harness.step([Row(3, features.bfloat16(), bonus=11)])
    reference = replace(pair, drafter=meant).load_drafter()
    expected = block_states(pair.load_target(), reference, features, 11, pair.spec.max_draft_tokens)
    error = (harness.hidden.float() - expected).norm() / expected.norm()
    # Kernels that are computed from their own inputs multiply the error.
    assert 0 < error < ROUNDING[way] * (3 if shape == "dflash2" else 1)
