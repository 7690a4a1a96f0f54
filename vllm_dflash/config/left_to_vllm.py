"""Drafters of method `dflash` that vLLM's own code runs and ours does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_dflash.checkpoint.read import load_config
from vllm_dflash.checkpoint.spec import ARCHITECTURES
from vllm_dflash.vllms_own import OWN_KEYS

OF_SPECULATORS = {"dspark": "Qwen3DSparkModel"}
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
    if {*ARCHITECTURES} & set(written) or not known & set(written):
        return None
    # As vLLM renames them: a target's architecture becomes its drafter's.
    renamed = EAGLEConfig(
        PretrainedConfig(architectures=written), truncated_vocab_size=0, method="dflash"
    ).architectures
    return next((name for name in renamed if name in known and name not in ARCHITECTURES), None)


def config_to_run(requested: Mapping[str, Any]) -> dict[str, Any] | None:
    """The drafter's `config.json`; None where only vLLM runs that drafter, which the log says.

    Args:
        requested: what the user wrote. Without a drafter, the config is empty.

    Raises:
        ValueError: (`DrafterError` included) there is no such drafter, or options of ours were
            written for one of vLLM's.
    """
    model = requested.get("model")
    if not model or not isinstance(model, str):
        return {}
    config = load_config(model, requested.get("revision"))
    architecture = architecture_of_vllm(config)
    if architecture is None:
        return config
    if own := [key for key in OWN_KEYS if key in requested]:
        raise ValueError(
            f"drafter {model!r} has architecture {architecture}, which vLLM's own code runs, not"
            f" vllm-dflash; {', '.join(own)} would mean nothing to it. Remove"
            f" {', '.join(map(repr, own))} from the speculative config."
        )
    from vllm.logger import init_logger

    is_dspark = "DSpark" in architecture
    init_logger("vllm.dflash").info(
        "vllm-dflash stays out: drafter %r has architecture %s, which vLLM's own code runs%s",
        model,
        architecture,
        '; for its whole method, DSpark, write "method": "dspark"' if is_dspark else "",
    )
    return None
