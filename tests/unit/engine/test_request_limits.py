"""Requests that would end a worker are refused in the front end, if the engine is ours."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.worker.gpu.sample import logit_bias

from support.configs_by_hand import QWEN
from vllm_dflash.checkpoint.read import parse_config
from vllm_dflash.config.engine_options import ADDITIONAL_CONFIG_KEY, EngineOptions, Runner
from vllm_dflash.engine.vllm_fixes.request_limits import (
    MOST_ALLOWED_TOKENS,
    MOST_STOP_TOKENS,
    SEEDS,
    check_request,
    refuse_fatal_requests,
)

OPTIONS = EngineOptions(7, 7, "fixed", parse_config("it", QWEN))


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
    check_request(asked(**fits), "v2")
    if too_many is not None:
        check_request(asked(**too_many), "v1")
        name = next(iter(too_many))
        count = 129 if name == "stop_token_ids" else 1025
        with pytest.raises(VLLMValidationError, match=f"{name}: {count} tokens"):
            check_request(asked(**too_many), "v2")


@pytest.mark.parametrize(
    ("seed", "count", "runners"),
    [
        (-(2**63) - 1, 1, ""),
        (-(2**63), 1, "v1 v2"),
        (0, 3, "v1 v2"),
        (2**63 - 1, 1, "v1 v2"),
        (2**63 - 1, 2, "v1"),  # the second answer uses the next seed
        (2**64 - 1, 2, ""),
        (2**64, 1, ""),
    ],
)
def test_seeds(seed: int | None, count: int, runners: str) -> None:
    kinds: tuple[Runner, ...] = ("v1", "v2")
    for runner in kinds:
        if runner in runners:
            check_request(asked(seed=seed, n=count), runner)
        else:
            with pytest.raises(VLLMValidationError, match="seed must fit into 64 bits"):
                check_request(asked(seed=seed, n=count), runner)


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_generator_takes_what_is_let_through(runner: Runner) -> None:
    """PyTorch's generator on V1, a 64-bit number on V2."""
    for seed in (SEEDS[runner][0], SEEDS[runner][-1]):
        _ = torch.Generator().manual_seed(seed) if runner == "v1" else np.array([seed], np.int64)


@pytest.mark.parametrize("is_ours", [True, False])
def test_only_engines_of_ours_are_looked_at(monkeypatch: pytest.MonkeyPatch, is_ours: bool) -> None:
    """The check is installed only once. No answer may be longer than the model allows."""
    params = asked(seed=2**64)
    monkeypatch.setattr(
        InputProcessor,
        "process_inputs",
        lambda self, request: SimpleNamespace(sampling_params=request),
    )
    refuse_fatal_requests()
    placed = InputProcessor.process_inputs
    refuse_fatal_requests()
    assert InputProcessor.process_inputs is placed
    additional = {ADDITIONAL_CONFIG_KEY: OPTIONS.to_json()} if is_ours else {}
    engine: Any = SimpleNamespace(
        vllm_config=SimpleNamespace(additional_config=additional),
        model_config=SimpleNamespace(max_model_len=100),
    )
    if is_ours:
        with pytest.raises(VLLMValidationError):
            placed(engine, params)
    else:
        assert placed(engine, params).sampling_params is params
    mistaken = SamplingParams(extra_args={"dflash": {"max_draft": 0}, "other": 1})
    if is_ours:
        with pytest.raises(VLLMValidationError, match=r"'dflash\.max_draft'.*dflash\.max_drafts"):
            placed(engine, mistaken)
    else:
        assert placed(engine, mistaken).sampling_params is mistaken
    endless = SamplingParams(max_tokens=2**40, min_tokens=2**39)
    found = placed(engine, endless).sampling_params
    assert (found.max_tokens, found.min_tokens) == ((100, 100) if is_ours else (2**40, 2**39))
    assert placed(engine, None).sampling_params is None  # a pooling model's
