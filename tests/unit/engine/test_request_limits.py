"""Requests that would end a worker are refused in the front end, if the engine is ours."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.worker.gpu.sample import logit_bias

from support.configs_by_hand import QWEN
from vllm_dflash.checkpoint.read import parse_config
from vllm_dflash.config.mode import ADDITIONAL_CONFIG_KEY, Mode
from vllm_dflash.engine.vllm_fixes.request_limits import (
    MOST_ALLOWED_TOKENS,
    MOST_STOP_TOKENS,
    check_request,
    refuse_what_ends_engines,
)

MODE = Mode(7, 7, "fixed", parse_config("it", QWEN))


def asked(**fields: Any) -> SamplingParams:
    params = SamplingParams(max_tokens=9)
    words = fields.pop("bad_words", None)
    for name, value in fields.items():
        setattr(params, name, value)
    params._all_stop_token_ids = set(fields.get("stop_token_ids", ()))
    params._bad_words_token_ids = words
    return params


def test_widths_are_vllms() -> None:
    assert logit_bias.MAX_NUM_ALLOWED_TOKEN_IDS == MOST_ALLOWED_TOKENS
    assert logit_bias.MAX_NUM_STOP_TOKEN_IDS == MOST_STOP_TOKENS


@pytest.mark.parametrize(
    ("fits", "too_many"),
    [
        ({"allowed_token_ids": [*range(1024)]}, {"allowed_token_ids": [*range(1025)]}),
        (
            {"stop_token_ids": [*range(128)], "min_tokens": 1},
            {"stop_token_ids": [*range(129)], "min_tokens": 1},
        ),
        ({"stop_token_ids": [*range(129)]}, None),
        ({"bad_words": [[1] * 512] * 2}, {"bad_words": [[1] * 512, [1] * 513]}),
    ],
)
def test_tables_of_v2(fits: dict[str, Any], too_many: dict[str, Any] | None) -> None:
    check_request(asked(**fits), on_v2=True)
    if too_many is not None:
        check_request(asked(**too_many), on_v2=False)
        name = next(iter(too_many))
        count = 129 if name == "stop_token_ids" else 1025
        with pytest.raises(VLLMValidationError, match=f"{name}: {count} tokens"):
            check_request(asked(**too_many), on_v2=True)


@pytest.mark.parametrize("seed", [-(2**63) - 1, 2**63])
def test_seeds_of_both_runners(seed: int) -> None:
    with pytest.raises(VLLMValidationError, match="seed must fit into 64 bits"):
        check_request(asked(seed=seed), on_v2=False)


def test_seeds_that_fit() -> None:
    for seed in (-(2**63), 0, 2**63 - 1, None):
        check_request(asked(seed=seed), on_v2=False)


@pytest.mark.parametrize("is_ours", [True, False])
def test_only_engines_of_ours_are_looked_at(monkeypatch: pytest.MonkeyPatch, is_ours: bool) -> None:
    """Once, however often it is placed; and no answer may be longer than the model allows."""
    params = asked(seed=2**63)
    monkeypatch.setattr(
        InputProcessor,
        "process_inputs",
        lambda self, request: SimpleNamespace(sampling_params=request),
    )
    refuse_what_ends_engines()
    placed = InputProcessor.process_inputs
    refuse_what_ends_engines()
    assert InputProcessor.process_inputs is placed
    additional = {ADDITIONAL_CONFIG_KEY: MODE.to_json()} if is_ours else {}
    engine: Any = SimpleNamespace(
        vllm_config=SimpleNamespace(additional_config=additional),
        model_config=SimpleNamespace(max_model_len=100),
    )
    if is_ours:
        with pytest.raises(VLLMValidationError):
            placed(engine, params)
    else:
        assert placed(engine, params).sampling_params is params
    endless = SamplingParams(max_tokens=2**40, min_tokens=2**39)
    found = placed(engine, endless).sampling_params
    assert (found.max_tokens, found.min_tokens) == ((100, 100) if is_ours else (2**40, 2**39))
    assert placed(engine, None).sampling_params is None  # of a pooling model
