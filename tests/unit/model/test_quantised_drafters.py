"""Drafters in 8-bit integers on vLLM's CPU kernels, against the numbers that they stand for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.drafter_harness import ProposerHarness, Row
from support.pairs import Pair, dflash2_config, make_pair
from support.targets import quantise
from vllm_dflash.checkpoint.read import read_drafter
from vllm_dflash.model.reference_decoding import block_states

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "biases": {"attention_bias": True},
    "value-scale": {"dflash_config": {"attention_value_scale": 0.7}},
    "dflash2": dflash2_config(dflash_config={"conv_group_size": 4}),  # AMX takes 32 rows at least
}
FIRST_LAYER = [f"layers.0.self_attn.{part}_proj" for part in "qkv"]
LEFT_OUT = {"all": (), "fc": ("fc",), "a-layer": FIRST_LAYER}
ROUNDING = {"dflash2": 0.25}
"""Of inputs to 8 bits, row by row, in every layer, and of all to bfloat16, which vLLM's kernels for
AMX take; relative to the hidden states. Kernels that are made of their own inputs multiply it."""


def dequantised(source: Path, folder: Path) -> None:
    """The same weights as plain numbers."""
    tensors = load_file(source / "model.safetensors")
    scales = {name: tensors.pop(name) for name in [*tensors] if name.endswith("_scale")}
    for name, scale in scales.items():
        weight = name.removesuffix("_scale")
        tensors[weight] = tensors[weight].float() * scale
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("left_out", LEFT_OUT.values(), ids=LEFT_OUT)
@pytest.mark.parametrize("shape", SHAPES)
def test_hidden_states_are_those_of_the_weights_they_stand_for(
    tmp_path: Path, shape: str, left_out: tuple[str, ...]
) -> None:
    plain = make_pair(tmp_path, **SHAPES[shape])
    quantise(plain.drafter, tmp_path / "quantised", left_out=left_out)
    dequantised(tmp_path / "quantised", tmp_path / "plain")
    pair = Pair(plain.target, tmp_path / "quantised", read_drafter(str(tmp_path / "quantised")))
    assert pair.spec.quantization == "compressed-tensors"
    harness = ProposerHarness(pair, dtype="bfloat16")
    linear = [name for name, _ in harness.proposer.model.named_parameters() if "scale" in name]
    assert linear
    width = len(pair.spec.taps) * pair.spec.target_hidden_size
    features = torch.randn(45, width, generator=torch.Generator().manual_seed(1))
    harness.step([Row(3, features.bfloat16(), bonus=11)])
    reference = replace(pair, drafter=tmp_path / "plain").load_drafter()
    expected = block_states(pair.load_target(), reference, features, 11, pair.spec.max_draft_tokens)
    error = (harness.hidden.float() - expected).norm() / expected.norm()
    assert 0 < error < ROUNDING.get(shape, 0.08)
