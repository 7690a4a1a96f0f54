"""All fields that a request can have are accounted for: a new one fails here first."""

from __future__ import annotations

from vllm import SamplingParams
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from support.crossed_requests import FEATURES, NOT_OF_REQUESTS

OTHER_NAMES = {
    "max_completion_tokens": "max_tokens",
    "response_format": "structured_outputs",
    "top_logprobs": "logprobs",
    "vllm_xargs": "extra_args",
    "tool_choice": "structured_outputs",
    "tools": "structured_outputs",
    "stream": "output_kind",
    "reasoning_effort": "thinking_token_budget",
}
"""Fields of OpenAI's requests that become fields of `SamplingParams`."""
OF_THE_PROMPT = {
    *("messages", "prompt", "prompt_embeds", "suffix", "add_generation_prompt"),
    *("add_special_tokens", "chat_template", "chat_template_kwargs", "continue_final_message"),
    *("documents", "media_io_kwargs", "mm_payload", "mm_processor_kwargs", "cache_salt"),
    *("truncate_prompt_tokens", "truncation_side", "ec_transfer_params", "kv_transfer_params"),
}
"""Which tokens there are, and what the cache holds for them: test_hazards.py."""
OF_THE_ANSWER = {
    *("echo", "include_reasoning", "parallel_tool_calls", "return_mm_kwargs"),
    *("return_prompt_text", "return_token_ids", "return_token_offsets"),
    *("return_tokens_as_token_ids", "stream_options"),
}
"""How the front end writes an answer."""
OF_THE_SERVER = {"model", "priority", "request_id", "session_id", "user"}
SEARCHES = {"use_beam_search", "length_penalty"}
"""Beam search makes many requests of one token each, with log-probabilities."""


def test_every_field_of_sampling_params_has_values_or_a_reason() -> None:
    public = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    assert FEATURES.keys() | NOT_OF_REQUESTS.keys() == public
    assert not FEATURES.keys() & NOT_OF_REQUESTS.keys()


def test_every_field_of_openai_requests_is_known() -> None:
    known = FEATURES.keys() | NOT_OF_REQUESTS.keys() | OTHER_NAMES.keys()
    known |= OF_THE_PROMPT | OF_THE_ANSWER | OF_THE_SERVER | SEARCHES
    fields = {*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields}
    assert fields - known == set()
    assert {*OTHER_NAMES.values()} <= FEATURES.keys()
