"""A request that exceeds the limits of Model Runner V2 is refused, and does not end the engine.

Wrong in vLLM 0.32.0 and 0.33.0, plain decoding included: V2 keeps sampling parameters in tables of
fixed width, and a worker that gets more raises, which ends the engine for all users. The front end,
which could answer that request with HTTP 400, does not know these widths; nor does it check seeds
offline, or of the later ones of `n` answers. Not reported yet (docs/engineering/upstream.md).
When `InputProcessor.process_inputs` refuses such requests, this file is needed only for what is
checked beside them: a request's own options (`config/request_options.py`).
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from vllm import envs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor

from vllm_dflash.config.engine_options import ADDITIONAL_CONFIG_KEY, EngineOptions, Runner
from vllm_dflash.config.request_options import KEY, request_options

MOST_ALLOWED_TOKENS, MOST_STOP_TOKENS = 1024, 128
"""Limits in vLLM's `logit_bias.py`, which the front end must not import: it imports Triton."""
SEEDS = {"v1": range(-(2**63), 2**64), "v2": range(-(2**63), 2**63)}
"""Seeds that PyTorch's generator accepts (V1), and that fit a signed 64-bit integer (V2)."""


def refuse_fatal_requests() -> None:
    """Check each request for our engines in the front end (hook 20)."""
    process_inputs = InputProcessor.process_inputs
    if hasattr(process_inputs, "wrapped_by_vllm_dflash"):
        return

    @wraps(process_inputs)
    def process_limited(self: InputProcessor, *args: Any, **kwargs: Any) -> EngineCoreRequest:
        request = process_inputs(self, *args, **kwargs)
        additional = self.vllm_config.additional_config
        is_ours = isinstance(additional, dict) and ADDITIONAL_CONFIG_KEY in additional
        if is_ours and (asked := request.sampling_params) is not None:
            check_options(asked)
            check_request(asked, EngineOptions.of(self.vllm_config).runner)
            # No text can be longer, and V2 stores this in 32 bits.
            asked.max_tokens = min(asked.max_tokens, self.model_config.max_model_len)
            asked.min_tokens = min(asked.min_tokens, asked.max_tokens)
        return request

    process_limited.wrapped_by_vllm_dflash = True  # type: ignore[attr-defined]
    InputProcessor.process_inputs = process_limited


def check_options(asked: SamplingParams) -> None:
    """Refuse a request whose options of ours are wrong.

    Raises:
        VLLMValidationError: says what is allowed; a server answers with HTTP 400.
    """
    if not asked.extra_args:
        return
    try:
        request_options(asked.extra_args)
    except ValueError as why:
        raise VLLMValidationError(str(why), parameter=KEY) from None


def check_request(asked: SamplingParams, runner: Runner) -> None:
    """Refuse a request that would crash the worker.

    `asked`: as `process_inputs` returns it, with stop tokens and tokens of bad words.

    Raises:
        VLLMValidationError: the request exceeds a limit; a server answers with HTTP 400.
    """
    # With n answers, each has the seed of the one before it plus 1.
    seeds = [] if asked.seed is None else [asked.seed, asked.seed + asked.n - 1]
    if any(seed not in SEEDS[runner] for seed in seeds):
        raise VLLMValidationError(
            f"seed must fit into 64 bits (with n added), got {asked.seed}.",
            parameter="seed",
            value=asked.seed,
        )
    if runner == "v1":
        return
    bad_words = sum(map(len, asked.bad_words_token_ids or ()))
    stop_tokens = len(asked.all_stop_token_ids) if asked.min_tokens else 0
    for name, count, most in (
        ("allowed_token_ids", len(asked.allowed_token_ids or ()), MOST_ALLOWED_TOKENS),
        ("stop_token_ids", stop_tokens, MOST_STOP_TOKENS),
        ("bad_words", bad_words, envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS),
    ):
        if count > most:
            beside = " beside min_tokens" if name == "stop_token_ids" else ""
            raise VLLMValidationError(
                f"{name}: {count} tokens{beside}, and vLLM's Model Runner V2 takes {most} at most.",
                parameter=name,
                value=count,
            )
