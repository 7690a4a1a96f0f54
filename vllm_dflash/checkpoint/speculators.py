"""Configs of the speculators library, written as z-lab would."""

from __future__ import annotations

from typing import Any

from vllm_dflash.checkpoint.fields import shown
from vllm_dflash.checkpoint.spec import DrafterError

AT_TOP_LEVEL = ("block_size", "draft_vocab_size", "target_hidden_size", "quantization_config")


def from_speculators(model: str, config: dict[str, Any]) -> dict[str, Any]:
    """Translate. Its tap numbers count the embedding as 0, so they are one higher.

    Raises:
        DrafterError: it is another kind of drafter, or its own fields are not what they must be.
    """
    kind = config["speculators_model_type"]
    if kind != "dflash":
        raise DrafterError(
            f"drafter {model!r} is not a DFlash checkpoint: speculators_model_type is {kind!r},"
            " expected 'dflash'."
        )
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise DrafterError(
            f"drafter {model!r}: transformer_layer_config must be an object, config.json says"
            f" {shown(layer)}."
        )
    ids = config.get("aux_hidden_state_layer_ids")
    if not isinstance(ids, list) or not all(type(i) is int and i >= 1 for i in ids):
        raise DrafterError(
            f"drafter {model!r}: aux_hidden_state_layer_ids must be a list of numbers from 1 (the"
            f" first layer's output) on, config.json says {shown(ids)}."
        )
    return {
        **layer,
        **{name: config[name] for name in AT_TOP_LEVEL if config.get(name) is not None},
        "architectures": ["DFlashDraftModel"],
        "dflash_config": {
            "mask_token_id": config.get("mask_token_id"),
            "target_layer_ids": [i - 1 for i in ids],
            "sample_from_anchor": config.get("sample_from_anchor", False),
            "causal": not config.get("sliding_window_non_causal", True),
        },
    }
