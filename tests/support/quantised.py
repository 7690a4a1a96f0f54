"""Quantised checkpoints, of targets and of drafters, as compressed-tensors writes them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
GROUP = 32


def as_int8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Quantise by channel. Return the tensors and the numbers that they stand for."""
    scale = weight.abs().amax(dim=1, keepdim=True) / 127  # [out, 1]
    stored = (weight / scale).round().to(torch.int8)
    return {"weight": stored, "weight_scale": scale}, stored * scale


def as_fp8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Quantise by channel. Return the tensors and the numbers that they stand for."""
    scale = weight.abs().amax(dim=1, keepdim=True) / 448
    stored = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale": scale}, stored.float() * scale


def as_int4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Quantise in groups of `GROUP`, eight numbers to an int32. Return as `as_int8` does."""
    groups = weight.unflatten(1, (-1, GROUP))  # [out, in / GROUP, GROUP]
    scale = (groups.abs().amax(-1, keepdim=True) / 7).bfloat16()
    stored = (groups / scale).round().clamp(-8, 7)
    nibbles = (stored.flatten(1).to(torch.int32) + 8).unflatten(1, (-1, 8))
    packed = sum(nibbles[:, :, place] << 4 * place for place in range(8))
    parts = {
        "weight_packed": packed,
        "weight_scale": scale.squeeze(-1),
        "weight_shape": torch.tensor(weight.shape),
    }
    return parts, (stored * scale.float()).flatten(1)


def scheme(weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    return {"targets": ["Linear"], "weights": weights, "input_activations": inputs}


INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": GROUP}
BY_CHANNEL = {"strategy": "channel", "dynamic": False}
BY_TOKEN = {"strategy": "token", "dynamic": True}

WAYS: dict[str, tuple[str, Callable[..., tuple[Tensors, torch.Tensor]], dict[str, Any]]] = {
    "int8": ("int-quantized", as_int8, scheme(INT8 | BY_CHANNEL, INT8 | BY_TOKEN)),
    "fp8": ("float-quantized", as_fp8, scheme(FP8 | BY_CHANNEL, FP8 | BY_TOKEN)),
    "int4": ("pack-quantized", as_int4, scheme(INT4 | {"strategy": "group"}, None)),
}
OF_THE_HEAD = tuple(
    f"lilicorr.{name}" for name in ("factor_input_proj", "feature_mlp.up_proj", "anchor_out_head")
)
"""LiLiCorr's layers that are left as they are: one is never quantised, one has five columns."""


def quantise(
    source: Path, folder: Path, way: str = "int8", *, left_out: Sequence[str] = ("lm_head",)
) -> Tensors:
    """Write a model with its linear layers quantised, `fc` of a drafter among them.

    Returns:
        Its tensors, with the numbers that quantised ones stand for.
    """
    shutil.copytree(source, folder)
    stored = load_file(folder / "model.safetensors")
    meant = dict(stored)
    kind, quantised, group = WAYS[way]
    linear = ("_proj.weight", ".kernel_projection.weight")
    for name in meant:
        layer = name.removesuffix(".weight")
        is_inside = "layers." in name or name.startswith("lilicorr.")
        is_linear = (is_inside and name.endswith(linear)) or name == "fc.weight"
        if is_linear and layer not in left_out:
            parts, meant[name] = quantised(stored.pop(name).float())
            stored |= {f"{layer}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [*left_out],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return meant
