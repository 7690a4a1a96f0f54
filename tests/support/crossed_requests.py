"""Requests that ask for anything vLLM allows, alone and in random mixtures.

`FEATURES` holds values for every field of `SamplingParams`. `test_request_fields.py` compares it
with vLLM's own list, so a new field of vLLM fails the test until it is handled here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
from transformers import AutoTokenizer
from vllm import LLM, SamplingParams
from vllm.config.reasoning import ReasoningConfig
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    StructuredOutputsParams,
)

from support.engines import TARGET, USES_V2, held_out_prompts, scheduler_of
from vllm_dflash.config.request_options import most_drafts

TOKENS = 8 if USES_V2 else 20
"""Tokens of an answer. Triton's interpreter takes ten times as long."""
THINKING, THOUGHT = "<|im_start|>", "<|im_end|>"
REASONING = ReasoningConfig(reasoning_start_str=THINKING, reasoning_end_str=THOUGHT)
Fields = dict[str, Any]
PATTERN = r"def [a-z_]{3,12}\(self, [a-z]{1,8}\):"
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 20]}}, "required": ["a"]}

FEATURES: dict[str, list[Fields]] = {
    "presence_penalty": [{"presence_penalty": 0.7}],
    "frequency_penalty": [{"frequency_penalty": 0.6}],
    "repetition_penalty": [{"repetition_penalty": 1.3}],
    "temperature": [] if USES_V2 else [{"temperature": 0.8, "top_p": 1e-9}],
    "top_p": [{"top_p": 0.5}],
    "top_k": [{"top_k": 3}] if USES_V2 else [{"top_k": 3}, {"temperature": 0.8, "top_k": 1}],
    "min_p": [{"min_p": 0.2}],
    "seed": [{"seed": 7}],
    "n": [] if USES_V2 else [{"n": 2, "temperature": 0.8, "top_k": 1}],
    "stop": [{"stop": ["("]}, {"stop": ["se", ":\n"]}],
    "include_stop_str_in_output": [{"stop": [")"], "include_stop_str_in_output": True}],
    "stop_token_ids": [{"stop_token_ids": [*range(9, 90)]}, {"stop_token_ids": [260, 300]}],
    "ignore_eos": [{"ignore_eos": True}],
    "max_tokens": [{"max_tokens": count} for count in (1, 2, 7, 8, 9)],
    "min_tokens": [
        {"min_tokens": count, "stop_token_ids": [*range(9, 90)]} for count in (1, 2, 5, 8)
    ],
    "logprobs": [{"logprobs": 0}, {"logprobs": 3}],
    "prompt_logprobs": [{"prompt_logprobs": 0}, {"prompt_logprobs": 2}],
    "prompt_logprob_token_ids": [{"prompt_logprob_start": 0}] if USES_V2 else [],
    "prompt_logprob_start": [{"prompt_logprob_start": 2}] if USES_V2 else [],  # V1 refuses
    "logprob_token_ids": [{"logprob_token_ids": [5, 9, 260]}, {"logprob_token_ids": [261]}],
    "flat_logprobs": [{"logprobs": 2, "flat_logprobs": True}],
    "detokenize": [{"detokenize": False}],
    "skip_special_tokens": [{"skip_special_tokens": False}],
    "spaces_between_special_tokens": [{"spaces_between_special_tokens": False}],
    "output_kind": [{"output_kind": RequestOutputKind.DELTA}],
    "stream_interval": [{"output_kind": RequestOutputKind.DELTA, "stream_interval": 3}],
    "structured_outputs": [
        {"structured_outputs": StructuredOutputsParams(**what)}
        for what in (
            {"regex": PATTERN},
            {"json": SCHEMA},
            {"choice": ["import os", "import sys", "raise ValueError"]},
        )
    ],
    "allowed_token_ids": [{"allowed_token_ids": [*range(10, 500)]}],
    "bad_words": [{"bad_words": ["self"]}, {"bad_words": ["def", "return x", "import"]}],
    "extra_args": [
        {"extra_args": {"of_no_meaning": 1}},
        *({"extra_args": {"dflash": {"max_drafts": most}}} for most in (0, 1, 2)),
    ],
    "skip_reading_prefix_cache": [{"skip_reading_prefix_cache": True}],
    "thinking_token_budget": [{"thinking_token_budget": count} for count in (0, 1, 4, 6)],
    "repetition_detection": [{"repetition_detection": RepetitionDetectionParams(6, 1, 3)}],
}
"""Values of each field, with what else they need to have an effect. Nothing is left to chance:
tokens are drawn from a single one (on V2, none is drawn: the interpreter cannot run its kernel for
that). `test_lossless_sampling.py` tests the rest."""
NOT_OF_REQUESTS = {
    "skip_clone": "how a front end hands its object on",
    "output_text_buffer_length": "derived from `stop`",
    "watermarking": "only of engines with a watermark_config, which vLLM refuses with DFlash",
    "logit_bias": "refused in any speculative decoding: test_messages.py",
    "routed_experts_prompt_start": "only of models with experts",
    "trace_decode_token_ids": "refused in any speculative decoding",
}
"""Fields without values, and why."""
FROM_NOBODY_ELSE = {"structured_outputs", "allowed_token_ids", "n"}
"""Two of them in one request may leave no token at all."""


class Crossed(NamedTuple):
    """A request of a mixture."""

    prompt: list[int]
    params: SamplingParams
    about: str
    """The fields that it sets, in words."""
    arrival: int
    """Steps that the mixture has run before the request arrives."""
    hangs_up: int | None = None
    """Steps that the mixture has run when it leaves, whatever it has been answered."""


class Mixture(NamedTuple):
    """Requests that are served together."""

    requests: list[Crossed]
    reset: int | None
    """The step after which all running requests lose their cache, as by a preemption."""


Rows = list[dict[int, float]]
"""Log-probabilities of tokens, place by place."""


@dataclass
class Answer:
    """A request's answer as a user sees it."""

    is_refused: bool = False
    texts: dict[int, tuple[list[int], str, Any]] = field(default_factory=dict)
    """Tokens, text and why it ended, of each sequence."""
    logprobs: dict[int, Rows] = field(default_factory=dict)
    """Log-probabilities of each sequence, and at -1 those of the prompt."""
    prompt_scores: list[list[float]] = field(default_factory=list)


TOKENIZER = AutoTokenizer.from_pretrained(TARGET)
PROMPTS: list[list[int]] = [TOKENIZER.encode(text) for text in held_out_prompts(24)]
[THINKS] = TOKENIZER.encode(THINKING)


def _crossed(dice: random.Random, fields: Fields, about: str, arrival: int) -> Crossed:
    """Return a request with these fields; its prompt has any length and may repeat itself."""
    text = dice.choice(PROMPTS)
    prompt = text[: dice.randrange(1, 60)]
    if dice.random() < 0.3:
        prompt = prompt[:20] * 2
    if "thinking_token_budget" in fields:
        prompt = [*prompt, THINKS]
    if (first := fields.get("prompt_logprob_start")) is not None:
        prompt = [*prompt, *PROMPTS[0][:3]]
        fields = fields | {"prompt_logprob_token_ids": [[5, 260]] * (len(prompt) - 1 - first)}
    return Crossed(prompt, SamplingParams(**BASE | fields), about, arrival)


BASE: Fields = {"temperature": 0.0, "max_tokens": TOKENS}


def each_alone() -> Mixture:
    """Return every value of every field in a request of its own."""
    dice = random.Random(0)
    requests = [
        _crossed(dice, value, f"{name} {number}", 0)
        for name, values in FEATURES.items()
        for number, value in enumerate(values)
    ]
    return Mixture(requests, None)


def mixture(number: int) -> Mixture:
    """Return 2 to 8 requests with 0 to 4 features each, which arrive one by one; some hang up."""
    dice = random.Random(number)
    requests = []
    for _ in range(dice.randrange(2, 9)):
        while True:
            names = dice.sample(sorted(FEATURES), dice.randrange(5))
            chosen = [(name, dice.choice(FEATURES[name])) for name in names if FEATURES[name]]
            if len(FROM_NOBODY_ELSE.intersection(names)) > 1:
                continue
            fields: Fields = {}
            for _, value in chosen:
                fields |= value
            if fields.get("temperature"):
                fields |= {"top_p": 1e-9, "min_p": 0.0}  # otherwise it is drawn, or refused
                fields.pop("seed", None)  # V1 on CPUs fails at a seed and a prompt in chunks
            about = " + ".join(name for name, _ in chosen) or "nothing"
            try:
                requests.append(_crossed(dice, fields, about, dice.randrange(6)))
            except VLLMValidationError:  # fields that vLLM does not accept together
                continue
            break
    reset = dice.randrange(2, 12) if dice.random() < 0.3 else None
    for row, one in enumerate(requests):
        if dice.random() < 0.2:
            requests[row] = one._replace(hangs_up=one.arrival + dice.randrange(1, 8))
    return Mixture(requests, reset)


def answer_alone(llm: LLM, one: Crossed) -> Answer:
    """Return this engine's answer to a request without neighbours."""
    [answer] = serve(llm, Mixture([one._replace(arrival=0, hangs_up=None)], None), resets=False)
    return answer


def serve(
    llm: LLM,
    mix: Mixture,
    *,
    resets: bool,
    has_priorities: bool = False,
    check: Callable[[], object] = lambda: None,
) -> list[Answer]:
    """Return this engine's answers to a mixture. `resets`: reset the cache as the mixture says;
    `check`: is called after each step."""
    core, answers = llm.llm_engine, [Answer() for _ in mix.requests]
    waiting = {*range(len(mix.requests))}
    for step in range(4000):
        for number in sorted(waiting):
            one = mix.requests[number]
            if one.arrival <= step:
                prompt: Any = {"prompt_token_ids": one.prompt}
                waiting.discard(number)
                try:
                    priority = number % 3 if has_priorities else 0
                    core.add_request(str(number), prompt, one.params.clone(), priority=priority)
                except VLLMValidationError:
                    answers[number].is_refused = True
        core.abort_request([str(n) for n, one in enumerate(mix.requests) if one.hangs_up == step])
        if not waiting and not core.has_unfinished_requests():
            return answers
        for output in core.step():
            _take(answers[int(output.request_id)], output, mix.requests)
        check()
        if resets and step == mix.reset:
            core.reset_prefix_cache(reset_running_requests=True)
    raise AssertionError("not done after 4000 steps")


def _take(answer: Answer, output: RequestOutput, requests: list[Crossed]) -> None:
    params = requests[int(output.request_id)].params
    if output.prompt_logprobs is not None:
        answer.logprobs[-1] = _rows(output.prompt_logprobs)
    if output.prompt_token_id_logprobs is not None:
        answer.prompt_scores = output.prompt_token_id_logprobs.tolist()
    for one in output.outputs:
        tokens, text, rows = list[int](), "", Rows()
        if params.output_kind == RequestOutputKind.DELTA and one.index in answer.texts:
            tokens, text, _ = answer.texts[one.index]
            rows = answer.logprobs.get(one.index, [])
        ended = one.finish_reason, one.stop_reason
        answer.texts[one.index] = [*tokens, *one.token_ids], text + one.text, ended
        if one.logprobs is not None:
            answer.logprobs[one.index] = [*rows, *_rows(one.logprobs)]


def _rows(rows: Any) -> Rows:
    return [  # flat ones too
        {token: value.logprob for token, value in (rows[number] or {}).items()}
        for number in range(len(rows))
    ]


def difference(ours: Answer, plains: Answer, *, has_logprobs: bool = True) -> str | None:
    """Return what differs, in words; None if nothing does. Log-probabilities may be left out."""
    for name in ("is_refused", "texts"):
        if getattr(ours, name) != getattr(plains, name):
            return f"{name} {getattr(ours, name)} for {getattr(plains, name)}"
    if not has_logprobs:
        return None
    scores = np.array(ours.prompt_scores), np.array(plains.prompt_scores)
    if not np.allclose(*scores, rtol=0, atol=1e-4):
        return f"scores of the prompt {scores[0]} for {scores[1]}"
    got, wanted = ours.logprobs, plains.logprobs
    are_near = got.keys() == wanted.keys() and all(
        len(got[of]) == len(wanted[of])
        and all(a == pytest.approx(b, abs=1e-4) for a, b in zip(got[of], wanted[of], strict=True))
        for of in wanted
    )
    return None if are_near else f"logprobs {got} for {wanted}"


def wrong_answers(
    mix: Mixture, ours: list[Answer], plains: list[Answer], *, has_logprobs: bool = True
) -> list[str]:
    """Return what differs, of requests that have stayed to the end."""
    return [
        f"{one.about}: {why}"
        for one, mine, theirs in zip(mix.requests, ours, plains, strict=True)
        if one.hangs_up is None
        and (why := difference(mine, theirs, has_logprobs=has_logprobs)) is not None
    ]


def beyond_limits(mix: Mixture, verified: Mapping[str, Sequence[int]]) -> list[str]:
    """Return who had more drafts verified than it wants, by names of sequences in the engine."""
    found = []
    for name, counts in verified.items():
        one = mix.requests[int(name.partition("-")[0].rpartition("_")[2])]
        most = most_drafts(one.params.extra_args or {})
        if most is not None and max(counts) > most:
            found.append(f"{one.about}: at most {most} drafts, verified {counts}")
    return found


def check_order(llm: LLM) -> None:
    """Check that no request is left, and none of its blocks."""
    scheduler = scheduler_of(llm)
    assert not scheduler.requests
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # all but the null block
