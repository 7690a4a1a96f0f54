"""Rotary settings of a checkpoint, from any of their formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, model_validator

from vllm_dflash.checkpoint.dialects import FULL, SLIDING, ZlabConfig
from vllm_dflash.checkpoint.refusal import LARGEST, checked, described, positive, shown
from vllm_dflash.checkpoint.spec import MOST_POSITIONS

ASSUMED_BASE = 1_000_000.0
"""Base of the rotation if a config states none; the published drafters use it."""
NEEDED = {
    "linear": ["factor"],
    "dynamic": ["factor"],
    "yarn": ["factor"],
    "llama3": ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"],
}
"""Fields that each rotary type requires."""


class Rope(BaseModel):
    """`rope_parameters` in transformers 5's format."""

    model_config = ConfigDict(strict=True)

    rope_type: Literal["default", "linear", "dynamic", "yarn", "llama3"] = described(
        ..., "default, linear, dynamic, yarn or llama3"
    )
    rope_theta: float = positive()
    factor: float | None = positive(None)
    low_freq_factor: float | None = positive(None)
    high_freq_factor: float | None = positive(None)
    original_max_position_embeddings: float | None = positive(None)
    attention_factor: float | None = positive(None)
    beta_fast: float | None = positive(None)
    beta_slow: float | None = positive(None)
    mscale: float | None = described(None, "a number from 0", ge=0, lt=LARGEST)
    mscale_all_dim: float | None = described(None, "a number from 0", ge=0, lt=LARGEST)
    partial_rotary_factor: float | None = described(None, "at most 1", gt=0, le=1)
    rope_dim: None = described(None, "left out: each head is rotated in full")

    @model_validator(mode="after")
    def _is_complete(self) -> Rope:
        for name in NEEDED.get(self.rope_type, ()):
            if getattr(self, name) is None:
                raise ValueError(f"rope_type {self.rope_type} needs {name}")
        return self


def read_rope(config: dict[str, Any], layers: ZlabConfig) -> tuple[dict[str, Any], bool]:
    """Normalise `rope_parameters` (transformers 5) and `rope_theta`/`rope_scaling` (4).

    transformers 5 may have an entry for each type of layer. All layers of a drafter are rotated
    equally, so the entries of its layer types must be equal.

    Returns:
        The settings, and whether their base was assumed because none is stated.

    Raises:
        ValueError: an unknown type, a missing or impossible number, or other rotations for other
            layers. The message has no full stop.
    """
    source = next((k for k in ("rope_parameters", "rope_scaling") if config.get(k)), "rope_theta")
    written = config.get(source) if source != "rope_theta" else {}
    if not isinstance(written, dict):
        raise ValueError(f"{source} must be an object, config.json says {shown(written)}")
    at_top = {
        name: config[name]
        for name in ("rope_theta", "partial_rotary_factor")
        if config.get(name) is not None
    }
    # If there are entries by layer type, other keys alongside them are ignored, as in vLLM.
    entries = {name: value for name, value in written.items() if isinstance(value, dict)}
    if entries:
        used = [entries.get(SLIDING if slides else FULL) for slides in layers.slides]
        written = used[0] or {}
        if not all(used) or any(other != written for other in used):
            raise ValueError(
                f"{source} differs by layer type ({', '.join(entries)}), and drafters whose layers"
                " are rotated differently are not supported. Write the rotation that this one was"
                f' trained with as "{source}" in "drafter_overrides" of the speculative config,'
                " without layer types"
            )
    written = at_top | written
    return _read(written, source, layers), "rope_theta" not in written


def _read(written: Mapping[str, Any], source: str, layers: ZlabConfig) -> dict[str, Any]:
    """One rotation in transformers 5's format."""
    rope = dict(written)
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("rope_theta", ASSUMED_BASE)
    if rope["rope_type"] == "yarn" and rope.get("original_max_position_embeddings") is None:
        # The same default as in transformers.
        rope["original_max_position_embeddings"] = layers.max_position_embeddings
    fields = checked(Rope, rope, inside=source)
    # vLLM allocates a table with a row for every position that these numbers imply.
    is_yarn = fields.rope_type == "yarn"
    rows = fields.original_max_position_embeddings if is_yarn else layers.max_position_embeddings
    reach = (rows or 1) * (fields.factor or 1)
    if fields.rope_type != "llama3" and not 1 <= reach <= MOST_POSITIONS:
        raise ValueError(
            f"factor of {source} stretches the positions to {reach:.0f}, which must be from 1 to"
            f" {MOST_POSITIONS}"
        )
    turned = int(layers.head_dim * (fields.partial_rotary_factor or 1))
    if turned < 2 or turned % 2:
        raise ValueError(
            f"partial_rotary_factor of {source} ({fields.partial_rotary_factor}) rotates {turned}"
            f" of the {layers.head_dim} numbers of a head, which must be even"
        )
    return rope
