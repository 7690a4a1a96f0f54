"""Which `config.json` is a DFlash drafter's, by its architectures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_dflash.checkpoint.dialects import ARCHITECTURE_BY_TYPE
from vllm_dflash.checkpoint.refusal import shown
from vllm_dflash.checkpoint.spec import ARCHITECTURES, DrafterError


def is_drafter(config: Mapping[str, Any]) -> bool:
    """Whether this `config.json` claims to be a DFlash drafter's, in either dialect."""
    if config.get("speculators_model_type") is not None:
        return config["speculators_model_type"] in [*ARCHITECTURE_BY_TYPE]
    written = config.get("architectures")
    return isinstance(written, list) and any(name in written for name in ARCHITECTURES)


def check_not_swapped(
    drafter: str, config: Mapping[str, Any], target: str, target_config: Mapping[str, Any]
) -> None:
    """Refuse a target that is a drafter; the two may be swapped. Raises `DrafterError`."""
    if not is_drafter(target_config):
        return
    if is_drafter(config):
        raise DrafterError(
            f"target {target!r} is a DFlash drafter itself. Serve the model that it was trained"
            " for, and set 'model' in the speculative config to the drafter."
        )
    raise DrafterError(
        f"target {target!r} is a DFlash drafter, and drafter {drafter!r} is not: are the two"
        f" swapped? If so, serve {drafter!r} and set 'model' in the speculative config to"
        f" {target!r}."
    )


def check_architectures(architectures: Any) -> None:
    """Refuse a config whose architectures are not a DFlash drafter's. Raises `ValueError`."""
    if is_drafter({"architectures": architectures}):
        return
    if "DSpark" in str(architectures):
        raise ValueError(
            f"it is a DSpark checkpoint (architectures {shown(architectures)}), which method"
            ' "dflash" cannot run, with or without vllm-dflash. Write "method": "dspark" in the'
            " speculative config"
        )
    raise ValueError(
        "it is not a DFlash checkpoint that can be read: config.json has architectures"
        f" {shown(architectures)}, expected one of {[*ARCHITECTURES]}. If it is one,"
        " write that into its config.json, where vLLM reads it too"
    )
