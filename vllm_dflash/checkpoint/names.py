"""Names of tensors: what other checkpoints call them, and fused layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar

from vllm_dflash.checkpoint.spec import DrafterError

One = TypeVar("One")
LATTICE = "lilicorr."
"""Prefix of tensors in LiLiCorr's head."""
NUMBERED = {  # as in torch's Sequential, which early exports used
    "feature_mlp.0.": "feature_norm.",
    "feature_mlp.1.": "feature_mlp.up_proj.",
    "feature_mlp.3.": "feature_mlp.down_proj.",
    ".mlp.0.": ".mlp.up_proj.",
    ".mlp.2.": ".mlp.down_proj.",
}
"""Numbered layer names in LiLiCorr's head, and our names for them."""
OTHER_NAMES = {
    "midlayer.": "layers.0.",
    "encoder.output_norm_enc.": "hidden_norm.",
    "encoder.fc.": "fc.",
}
"""Names that vLLM's own DFlash also takes, and ours for them."""
FUSED_LAYERS = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}
"""Layers that are fused in the model, and may be in a checkpoint, too."""


def our_name(name: str) -> str:
    """Our name of a checkpoint's tensor; nearly always unchanged."""
    name = name.removeprefix("model.")
    others = NUMBERED if name.startswith(LATTICE) else OTHER_NAMES
    for other, ours in others.items():
        name = name.replace(other, ours)
    return name


def by_our_names(model: str, found: Mapping[str, One]) -> dict[str, One]:
    """The tensors of the drafter `model`, or something about each, by our names.

    Raises:
        DrafterError: two of them have the same name.
    """
    renamed: dict[str, str] = {}
    for name in found:
        if (other := renamed.setdefault(our_name(name), name)) != name:
            raise DrafterError(
                f"drafter {model!r}: the weights have one tensor twice, as {other} and as {name}."
                " Download the drafter again, or remove one of them (docs/checkpoints.md says how)."
            )
    return {ours: found[name] for ours, name in renamed.items()}


def fuse(expected: dict[str, tuple[int, ...]], found: Collection[str]) -> None:
    """Expect the fused layers that are `found` instead of their parts."""
    for name in found:
        for fused, parts in FUSED_LAYERS.items():
            separate = [name.replace(f".{fused}.", f".{part}.") for part in parts]
            if name not in separate and expected.keys() >= {*separate}:
                shapes = [expected.pop(part) for part in separate]
                expected[name] = (sum(shape[0] for shape in shapes), *shapes[0][1:])
