"""Our draft model in vLLM's registry, in place of vLLM's own."""

from __future__ import annotations

from typing import Any

from vllm_dflash.checkpoint.spec import ARCHITECTURE
from vllm_dflash.config.engine_options import DRAFT_MODEL

_vllms_own: dict[str, Any] = {}
"""vLLM's entries of its registry that ours have replaced, by architecture."""


def register_draft_model(kind: type | str = DRAFT_MODEL) -> None:
    """Register it, in the front end and in every worker."""
    from vllm.model_executor.models.registry import ModelRegistry

    models = getattr(ModelRegistry, "models", {})
    if ARCHITECTURE in models:
        _vllms_own.setdefault(ARCHITECTURE, models[ARCHITECTURE])
    ModelRegistry.register_model(ARCHITECTURE, kind)


def restore_draft_model() -> None:
    """Put vLLM's own back, for an engine that vLLM's own DFlash runs."""
    from vllm.model_executor.models.registry import ModelRegistry

    getattr(ModelRegistry, "models", {}).update(_vllms_own)
