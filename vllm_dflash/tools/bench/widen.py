"""Make a small trained pair cost as much as a large one, without changing what it computes.

The widths are padded with zeros and identity layers are appended (Net2Net, arXiv 1511.05641). Both
models predict the same as before, so acceptance remains that of trained models on real text, while
time and memory are those of the larger shapes, since kernels do not skip zeros.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

CONFIG, WEIGHTS = "config.json", "model.safetensors"
NORMS_OF_HIDDEN = ("input_layernorm", "post_attention_layernorm", "hidden_norm", "norm")
FULL_ATTENTION = "full_attention"
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
)
"""Names in a config of the fields of `Shape`, in order."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a model of the Qwen3 family."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    layers: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        """Return the shape that a `config.json` describes."""
        return cls(*(config[name] for name in SIZES))


WIDE_TARGET = Shape(hidden=1024, intermediate=3072, heads=16, kv_heads=8, layers=16)
"""Widens the demo pair's target to 203 M parameters."""
WIDE_DRAFTER = Shape(hidden=1024, intermediate=1792, heads=8, kv_heads=4, layers=3)
"""Widens the demo pair's drafter to 24 M parameters of its own, an eighth of the target."""


def widen_pair(
    pair: Path,
    out: Path,
    target: Shape = WIDE_TARGET,
    drafter: Shape = WIDE_DRAFTER,
    positions: int = 0,
) -> None:
    """Write a widened copy of the pair in folder `pair` to `out`.

    Its configs allow a context of at least `positions` tokens. Beyond the context that the original
    was trained for, costs are right but texts are noise. Both hidden sizes are the same, and the
    original's times a power of four, by which norms rescale exactly in binary. Heads are grouped as
    before, the drafter's depth stays, since its context is per layer, and no layer has a window.
    """
    for name, shape in (("target", target), ("drafter", drafter)):
        config = json.loads((pair / name / CONFIG).read_text())
        weights = widen(load_file(pair / name / WEIGHTS), config, shape)
        # The zeros shrink the mean squares, so epsilon must shrink with them.
        config["rms_norm_eps"] *= config["hidden_size"] / shape.hidden
        config |= dict(zip(SIZES, astuple(shape), strict=True))
        config["layer_types"] = [FULL_ATTENTION] * shape.layers
        config["max_window_layers"] = shape.layers
        config["max_position_embeddings"] = max(config["max_position_embeddings"], positions)
        if name == "drafter":
            config["num_target_layers"] = target.layers
        shutil.copytree(pair / name, out / name, dirs_exist_ok=True)
        (out / name / CONFIG).write_text(json.dumps(config, indent=2))
        save_file(weights, out / name / WEIGHTS, metadata={"format": "pt"})


def widen(
    weights: dict[str, torch.Tensor], config: dict[str, Any], shape: Shape
) -> dict[str, torch.Tensor]:
    """Return widened copies of a checkpoint's tensors. `config`: the original's."""
    old = Shape.of(config)
    shrink = math.isqrt(shape.hidden // old.hidden)
    head_dim = config["head_dim"]
    rows: dict[str, int] = {
        "q_proj": shape.heads * head_dim,
        "k_proj": shape.kv_heads * head_dim,
        "v_proj": shape.kv_heads * head_dim,
        "gate_proj": shape.intermediate,
        "up_proj": shape.intermediate,
    }
    columns = {"o_proj": shape.heads * head_dim, "down_proj": shape.intermediate}

    def wide(name: str, tensor: torch.Tensor) -> torch.Tensor:
        part = name.split(".")[-2]
        if part in ("q_norm", "k_norm"):
            return tensor
        if part in NORMS_OF_HIDDEN:
            return _padded(tensor / shrink, (shape.hidden,))
        if part in ("embed_tokens", "lm_head"):
            return _padded(tensor, (len(tensor), shape.hidden))
        if part == "fc":  # one block of columns per tap
            taps = tensor.unflatten(1, (-1, old.hidden))
            return _padded(taps, (shape.hidden, taps.shape[1], shape.hidden)).flatten(1)
        return _padded(tensor, (rows.get(part, shape.hidden), columns.get(part, shape.hidden)))

    result = {name: wide(name, tensor).contiguous() for name, tensor in weights.items()}
    for layer in range(old.layers, shape.layers):
        for name in [name for name in weights if ".layers.0." in f".{name}"]:
            new = name.replace("layers.0.", f"layers.{layer}.")
            # An identity layer: its two output projections are zero.
            is_output = name.split(".")[-2] in ("o_proj", "down_proj")
            result[new] = torch.zeros_like(result[name]) if is_output else result[name].clone()
    return result


def _padded(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    padded = tensor.new_zeros(shape)
    padded[tuple(slice(size) for size in tensor.shape)] = tensor
    return padded
