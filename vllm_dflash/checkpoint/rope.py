"""Rotary settings of a checkpoint, from any of the ways they are written in."""

from __future__ import annotations

from typing import Any

from vllm_dflash.checkpoint.spec import DrafterError

NEEDED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}
"""Rotary types that are known, and the fields each cannot do without."""


def read_rope(model: str, config: dict[str, Any]) -> dict[str, Any]:
    """Normalise `rope_parameters` (transformers 5) and `rope_theta`/`rope_scaling` (4).

    Raises:
        DrafterError: a type we do not know, a missing or impossible number.
    """
    source = next((k for k in ("rope_parameters", "rope_scaling") if config.get(k)), "rope_theta")
    written = config.get(source) if source != "rope_theta" else {}
    if not isinstance(written, dict):
        raise DrafterError(
            f"drafter {model!r}: {source} must be an object, config.json says {written!r}."
        )
    rope = dict(written)
    per_layer = [name for name, value in rope.items() if isinstance(value, dict)]
    if per_layer:
        raise DrafterError(
            f"drafter {model!r}: {source} differs by layer type ({', '.join(per_layer)}), which is"
            " not supported: context keys of all layers are rotated in one operation."
        )
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("rope_theta", config.get("rope_theta", 1_000_000.0))
    kind = rope["rope_type"]
    if kind not in NEEDED:
        raise DrafterError(
            f"drafter {model!r}: {source} has rope_type {kind!r}; known are {', '.join(NEEDED)}."
        )
    for name in ("rope_theta", *NEEDED[kind]):
        value = rope.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise DrafterError(
                f"drafter {model!r}: {name} of {source} must be a positive number,"
                f" config.json says {value!r}."
            )
    return rope
