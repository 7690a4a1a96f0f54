"""Requests whose options of ours are wrong are refused in the front end, if the engine is ours."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.input_processor import InputProcessor

from vllm_dflash.config.engine_options import ADDITIONAL_CONFIG_KEY
from vllm_dflash.engine.checked_requests import check_requests


@pytest.mark.parametrize("is_ours", [True, False])
def test_only_engines_of_ours_are_looked_at(monkeypatch: pytest.MonkeyPatch, is_ours: bool) -> None:
    """The check is installed only once."""
    monkeypatch.setattr(
        InputProcessor,
        "process_inputs",
        lambda self, request: SimpleNamespace(sampling_params=request),
    )
    check_requests()
    placed = InputProcessor.process_inputs
    check_requests()
    assert InputProcessor.process_inputs is placed
    additional = {ADDITIONAL_CONFIG_KEY: "{}"} if is_ours else {}
    engine: Any = SimpleNamespace(vllm_config=SimpleNamespace(additional_config=additional))
    mistaken = SamplingParams(extra_args={"dflash": {"max_draft": 0}, "other": 1})
    if is_ours:
        with pytest.raises(VLLMValidationError, match=r"'dflash\.max_draft'.*dflash\.max_drafts"):
            placed(engine, mistaken)
    else:
        assert placed(engine, mistaken).sampling_params is mistaken
    for asked in (SamplingParams(), SamplingParams(extra_args={"dflash.max_drafts": 1}), None):
        assert placed(engine, asked).sampling_params is asked  # None: a pooling model's
