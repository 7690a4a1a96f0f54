"""Our asynchronous scheduler without vLLM's below it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine import EngineCoreOutputs

from vllm_dflash.config.options import DFlashOptions

CONTEXT_TOKENS = 100
"""Of every request there could be."""


def take_vllm_out(monkeypatch: pytest.MonkeyPatch, max_draft: int) -> None:
    """From now on vLLM's scheduler does nothing, and ours chooses from 0 to so many drafts."""
    requests = SimpleNamespace(get=lambda _: SimpleNamespace(num_computed_tokens=CONTEXT_TOKENS))
    monkeypatch.setattr(AsyncScheduler, "__init__", lambda self: None)
    monkeypatch.setattr(AsyncScheduler, "update_from_output", lambda *_: {0: EngineCoreOutputs()})
    monkeypatch.setattr(AsyncScheduler, "_update_after_schedule", lambda *_: None)
    for name, value in (
        ("num_spec_tokens", max_draft),
        ("vllm_config", None),
        ("requests", requests),
    ):
        monkeypatch.setattr(AsyncScheduler, name, value, raising=False)
    monkeypatch.setattr(DFlashOptions, "of", lambda _: SimpleNamespace(draft_length="adaptive"))
