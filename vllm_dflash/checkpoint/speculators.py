"""Configs of the speculators library, written as z-lab would."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, PositiveInt

from vllm_dflash.checkpoint.refusal import checked, described, flag
from vllm_dflash.checkpoint.spec import ARCHITECTURE, ARCHITECTURE_2, DFlash2, DrafterError
from vllm_dflash.checkpoint.zlab import SLIDING

AT_TOP_LEVEL = ("block_size", "draft_vocab_size", "target_hidden_size", "quantization_config")

ARCHITECTURE_OF = {"dflash": ARCHITECTURE, "dflash2": ARCHITECTURE_2}
"""Of each `speculators_model_type` that is read here."""


class Speculators(BaseModel):
    """What stands beside the layers' own config, and is written in another way by z-lab."""

    model_config = ConfigDict(strict=True)

    transformer_layer_config: dict[str, Any] = described(..., "an object")
    aux_hidden_state_layer_ids: list[PositiveInt] = described(
        ..., "a list of numbers from 1 (the first layer's output) on", fail_fast=True
    )
    sliding_window_non_causal: bool = flag(True)


def from_speculators(model: str, config: dict[str, Any]) -> dict[str, Any]:
    """Translate. Its tap numbers count the embedding as 0, so they are one higher.

    Raises:
        DrafterError: it is another kind of drafter, or its own fields are not what they must be.
    """
    kind = config["speculators_model_type"]
    if kind not in [*ARCHITECTURE_OF]:  # whatever JSON it is
        hint = '; method "dspark" runs those' if kind == "dspark" else ""
        raise DrafterError(
            f"drafter {model!r} is not a DFlash checkpoint: speculators_model_type is {kind!r},"
            f" expected 'dflash' or 'dflash2'{hint}."
        )
    own = checked(Speculators, config, lambda why: DrafterError(f"drafter {model!r}: {why}."))
    beside = DFlash2.model_fields if kind == "dflash2" else ()
    nested = {name: config.get(name) for name in beside} | {
        "mask_token_id": config.get("mask_token_id"),
        "target_layer_ids": [i - 1 for i in own.aux_hidden_state_layer_ids],
        "sample_from_anchor": config.get("sample_from_anchor"),
    }
    # Said of sliding layers only: full ones are trained bidirectional whatever it is. vLLM 0.32
    # makes them causal as well (vllm#56692); left out here, each layer is what its type says.
    if own.sliding_window_non_causal:
        nested["causal"] = False
    return {
        **_with_one_rotation(own.transformer_layer_config),
        **{name: config[name] for name in AT_TOP_LEVEL if config.get(name) is not None},
        "architectures": [ARCHITECTURE_OF[kind]],
        "dflash_config": nested,
    }


def _with_one_rotation(layers: dict[str, Any]) -> dict[str, Any]:
    """The layers' config with the rotation that the library trains them with.

    Of a target that rotates its layer types differently, it takes the sliding ones' for all layers
    of the drafter, whatever their own type (`flatten_rope_parameters`). A config may still hold
    the entries that it was taken from.
    """
    rope = layers.get("rope_parameters")
    if isinstance(rope, dict) and isinstance(rope.get(SLIDING), dict):
        return {**layers, "rope_parameters": rope[SLIDING]}
    return layers
