"""Drafters of method `dflash` that vLLM's own code runs and ours does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_dflash.config.speculative_settings import OWN_KEYS

OURS = "DFlashDraftModel"
OF_SPECULATORS = {"dflash2": "DFlash2DraftModel", "dspark": "Qwen3DSparkModel"}
"""Kinds of the speculators library that vLLM runs under this method, and as what."""


def architecture_of_vllm(config: Mapping[str, Any]) -> str | None:
    """The architecture that only vLLM runs; None where it is ours, or nobody's.

    `config`: of the drafter.
    """
    from transformers import PretrainedConfig
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.transformers_utils.configs.eagle import EAGLEConfig

    kind = config.get("speculators_model_type")
    if kind is not None:
        return OF_SPECULATORS.get(kind) if isinstance(kind, str) else None
    written = config.get("architectures")
    if not isinstance(written, list) or not all(isinstance(name, str) for name in written):
        return None
    known = ModelRegistry.get_supported_archs()
    if OURS in written or not known & set(written):
        return None
    # As vLLM renames them: a target's architecture becomes its drafter's.
    renamed = EAGLEConfig(
        PretrainedConfig(architectures=written), truncated_vocab_size=0, method="dflash"
    ).architectures
    return next((name for name in renamed if name in known and name != OURS), None)


def leave_to_vllm(requested: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Whether this drafter is none of ours but runs in vLLM; says so in the log.

    Args:
        requested: what the user wrote.
        config: the drafter's `config.json`.

    Raises:
        ValueError: options of ours were written for it.
    """
    from vllm.logger import init_logger

    architecture = architecture_of_vllm(config)
    if architecture is None:
        return False
    model = requested["model"]
    if own := sorted(OWN_KEYS & requested.keys()):
        raise ValueError(
            f"drafter {model!r} has architecture {architecture}, which vLLM's own code runs, not"
            f" vllm-dflash; {', '.join(own)} would mean nothing to it. Remove"
            f" {', '.join(map(repr, own))} from the speculative config."
        )
    hint = ""
    if "DSpark" in architecture:
        hint = '; for its whole method, DSpark, write "method": "dspark"'
    init_logger("vllm.dflash").info(
        "vllm-dflash stays out: drafter %r has architecture %s, which vLLM's own code runs%s",
        model,
        architecture,
        hint,
    )
    return True
