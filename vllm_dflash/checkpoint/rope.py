"""Rotary settings of a checkpoint, from any of the ways they are written in."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, model_validator

from vllm_dflash.checkpoint.refusal import LARGEST, checked, described, positive, shown
from vllm_dflash.checkpoint.spec import DrafterError

MOST_POSITIONS = 1 << 22

Number = int | float


NEEDED = {
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
"""Fields that a rotary type cannot do without."""


class Rope(BaseModel):
    """`rope_parameters` as transformers 5 writes it."""

    model_config = ConfigDict(strict=True)

    rope_type: Literal["default", "linear", "dynamic", "yarn", "llama3"] = described(
        ..., "default, linear, dynamic, yarn or llama3"
    )
    rope_theta: Number = positive()
    factor: Number | None = positive(None)
    low_freq_factor: Number | None = positive(None)
    high_freq_factor: Number | None = positive(None)
    original_max_position_embeddings: Number | None = positive(None)
    attention_factor: Number | None = positive(None)
    beta_fast: Number | None = positive(None)
    beta_slow: Number | None = positive(None)
    mscale: Number | None = described(None, "a number from 0", ge=0, lt=LARGEST)
    mscale_all_dim: Number | None = described(None, "a number from 0", ge=0, lt=LARGEST)
    partial_rotary_factor: Number | None = described(None, "at most 1", gt=0, le=1)
    rope_dim: None = described(None, "left out: heads are rotated as a whole")

    @model_validator(mode="after")
    def _is_complete(self) -> Rope:
        for name in NEEDED.get(self.rope_type, ()):
            if getattr(self, name) is None:
                raise ValueError(f"rope_type {self.rope_type} needs {name}")
        return self


def read_rope(model: str, config: dict[str, Any], max_positions: int) -> dict[str, Any]:
    """Normalise `rope_parameters` (transformers 5) and `rope_theta`/`rope_scaling` (4).

    `max_positions`: the drafter's max_position_embeddings.

    Raises:
        DrafterError: a type we do not know, a missing or impossible number.
    """

    def refuse(why: str) -> DrafterError:
        return DrafterError(f"drafter {model!r}: {why}.")

    source = next((k for k in ("rope_parameters", "rope_scaling") if config.get(k)), "rope_theta")
    written = config.get(source) if source != "rope_theta" else {}
    if not isinstance(written, dict):
        raise refuse(f"{source} must be an object, config.json says {shown(written)}")
    if per_layer := [name for name, value in written.items() if isinstance(value, dict)]:
        raise refuse(
            f"{source} differs by layer type ({', '.join(per_layer)}), which is not supported:"
            " context keys of all layers are rotated in one operation"
        )
    rope = dict(written)
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("rope_theta", config.get("rope_theta", 1_000_000.0))
    if rope["rope_type"] == "yarn" and rope.get("original_max_position_embeddings") is None:
        rope["original_max_position_embeddings"] = max_positions  # as transformers does
    fields = checked(Rope, rope, refuse, inside=source)
    # vLLM makes a table with a row for every position that these numbers promise.
    is_yarn = fields.rope_type == "yarn"
    rows = fields.original_max_position_embeddings if is_yarn else max_positions
    reach = (rows or 1) * (fields.factor or 1)
    if fields.rope_type != "llama3" and not 1 <= reach <= MOST_POSITIONS:
        raise refuse(
            f"factor of {source} stretches the positions to {reach:.0f}, which must be from 1 to"
            f" {MOST_POSITIONS}"
        )
    return rope
