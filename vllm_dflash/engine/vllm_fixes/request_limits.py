"""A request that Model Runner V2 has no room for is refused, and does not end the engine.

Wrong in vLLM 0.32.0 and 0.33.0, plain decoding included: V2 keeps what a request asks for in tables
of fixed width, and a worker that is given more raises, which ends the engine for everybody. The
front end, which could answer that request with HTTP 400, does not know those widths; nor which
seeds fit, offline or for the later ones of `n` answers. Not reported yet
(docs/engineering/upstream.md). Delete this file when `InputProcessor.process_inputs` refuses such
requests.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from vllm import envs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor

from vllm_dflash.config.mode import ADDITIONAL_CONFIG_KEY, Mode, Runner

MOST_ALLOWED_TOKENS, MOST_STOP_TOKENS = 1024, 128
"""Limits in vLLM's `logit_bias.py`, which the front end must not import: it brings Triton."""
SEEDS = {"v1": range(-(2**63), 2**64), "v2": range(-(2**63), 2**63)}
"""Seeds that PyTorch's generator takes (V1), and that a signed 64-bit integer holds (V2)."""


def refuse_what_ends_engines() -> None:
    """Hook 20, in the front end: for engines of ours, look at each request on its way in."""
    process_inputs = InputProcessor.process_inputs
    if hasattr(process_inputs, "wrapped_by_vllm_dflash"):
        return

    @wraps(process_inputs)
    def process_limited(self: InputProcessor, *args: Any, **kwargs: Any) -> EngineCoreRequest:
        request = process_inputs(self, *args, **kwargs)
        additional = self.vllm_config.additional_config
        is_ours = isinstance(additional, dict) and ADDITIONAL_CONFIG_KEY in additional
        if is_ours and (asked := request.sampling_params) is not None:
            check_request(asked, Mode.of(self.vllm_config).runner)
            # Nobody's text is longer, and V2 keeps this in 32 bits.
            asked.max_tokens = min(asked.max_tokens, self.model_config.max_model_len)
            asked.min_tokens = min(asked.min_tokens, asked.max_tokens)
        return request

    process_limited.wrapped_by_vllm_dflash = True  # type: ignore[attr-defined]
    InputProcessor.process_inputs = process_limited


def check_request(asked: SamplingParams, runner: Runner) -> None:
    """Refuse a request that would crash the worker.

    Args:
        asked: as `process_inputs` leaves it: stop tokens and the tokens of bad words are known.
        runner: the model runner that it is for.

    Raises:
        VLLMValidationError: which a server answers with HTTP 400.
    """
    # Of n answers, each has the seed of the one before it and 1.
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
