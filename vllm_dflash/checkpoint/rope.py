"""Rotary settings of a checkpoint, from any of the ways they are written in."""

from __future__ import annotations

from typing import Any

from vllm_dflash.checkpoint.fields import LARGEST_INTEGER, MOST, shown
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


OPTIONAL = (
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
    "partial_rotary_factor",
)
"""Numbers that may stand there, too."""


def read_rope(model: str, config: dict[str, Any], max_positions: int) -> dict[str, Any]:
    """Normalise `rope_parameters` (transformers 5) and `rope_theta`/`rope_scaling` (4).

    `max_positions`: the drafter's max_position_embeddings.

    Raises:
        DrafterError: a type we do not know, a missing or impossible number.
    """
    source = next((k for k in ("rope_parameters", "rope_scaling") if config.get(k)), "rope_theta")
    written = config.get(source) if source != "rope_theta" else {}
    if not isinstance(written, dict):
        raise DrafterError(
            f"drafter {model!r}: {source} must be an object, config.json says {shown(written)}."
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
    if kind == "yarn" and rope.get("original_max_position_embeddings") is None:
        rope["original_max_position_embeddings"] = max_positions  # as transformers does
    for name in ("rope_theta", *NEEDED[kind], *OPTIONAL):
        value = rope.get(name)
        if name in OPTIONAL and (value is None or (value == 0 and name.startswith("mscale"))):
            continue
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not 0 < value < LARGEST_INTEGER  # nor infinite, nor NaN, which JSON may hold
        ):
            raise DrafterError(
                f"drafter {model!r}: {name} of {source} must be a positive number,"
                f" config.json says {shown(value)}."
            )
    _check_reach(model, source, rope, max_positions)
    return rope


def _check_reach(model: str, source: str, rope: dict[str, Any], max_positions: int) -> None:
    """vLLM makes a table with a row for every position that these numbers promise."""
    rows = max_positions
    if rope["rope_type"] == "yarn":
        rows = rope["original_max_position_embeddings"]
    rows *= rope.get("factor") or 1
    most = MOST["max_position_embeddings"]
    if rope["rope_type"] != "llama3" and not 1 <= rows <= most:
        raise DrafterError(
            f"drafter {model!r}: factor of {source} stretches the positions to {rows:.0f}, which"
            f" must be from 1 to {most}."
        )
    if rope.get("rope_dim") is not None or (rope.get("partial_rotary_factor") or 0) > 1:
        raise DrafterError(
            f"drafter {model!r}: {source} rotates more or less than a head (rope_dim"
            f" {shown(rope.get('rope_dim'))}, partial_rotary_factor"
            f" {shown(rope.get('partial_rotary_factor'))}), which is not supported."
        )
