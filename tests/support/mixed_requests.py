"""Requests of all kinds, served by one engine at once, and their answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from transformers import AutoTokenizer
from vllm import LLM, RequestOutput, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from support.engines import TARGET, USES_V2, greedy, held_out_prompts, scheduler_of

# Triton's interpreter takes ten times as long.
TOKENS = 8 if USES_V2 else 24
TOP_K = 5
PATTERN = r"def [a-z_]{3,12}\(self, [a-z]{1,8}\):"
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 20]}}, "required": ["a"]}


class Asked(NamedTuple):
    """A request."""

    name: str
    prompt: list[int]
    params: SamplingParams

    @property
    def is_drawn(self) -> bool:
        """Whether its tokens are drawn at random."""
        return self.params.temperature > 0.0 and self.params.top_k != 1


@dataclass
class Answers:
    """Answers by request name, and the requests that hung up."""

    by_name: dict[str, RequestOutput] = field(default_factory=dict)
    hung_up: set[str] = field(default_factory=set)


def grammar(**what: Any) -> SamplingParams:
    return greedy(2 * TOKENS, structured_outputs=StructuredOutputsParams(**what))


def drawn(seed: int, **changes: Any) -> SamplingParams:
    """Return settings that draw. The interpreter cannot run V2's kernel for top-k. V1 on CPUs
    fails at a seed and a prompt in chunks, also without drafts."""
    kind: dict[str, Any] = {"seed": seed} if USES_V2 else {"top_k": TOP_K}
    return SamplingParams(temperature=0.8, max_tokens=TOKENS, logprobs=TOP_K, **kind, **changes)


def secret(number: int, length: int) -> list[int]:
    """Return tokens in no order, unlike any text."""
    dice = random.Random(number)
    return [dice.randrange(300, 2000) for _ in range(length)]


def mixed_requests(limit: int) -> list[Asked]:
    """Return requests for an engine with this context limit, neighbours of different kinds.

    Prompts have at most 40 tokens, except those that must end at the limit.
    """
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    texts = [tokenizer.encode(text) for text in held_out_prompts(20)]
    long = [token for text in texts for token in text]
    kinds: dict[str, SamplingParams] = {
        "greedy": greedy(TOKENS),
        "drawn": drawn(1),
        "one token": greedy(1),
        "repetition penalty": greedy(TOKENS, repetition_penalty=1.3),
        "log-probabilities": greedy(TOKENS, logprobs=2, prompt_logprobs=1),
        "regex": grammar(regex=PATTERN),
        "stop string": greedy(TOKENS, stop=["("]),
        "to the end": greedy(TOKENS, ignore_eos=True),
        "two tokens": greedy(2),
        "drawn, penalties": drawn(2, presence_penalty=0.5),
        "stop tokens": greedy(TOKENS, stop_token_ids=list(range(9, 60)), min_tokens=3),
        "bad words": greedy(TOKENS, bad_words=["self"]),
        "choice": grammar(choice=["import os", "import sys", "raise ValueError"]),
        "penalties": greedy(TOKENS, presence_penalty=0.6, frequency_penalty=0.4),
        "JSON": grammar(json=SCHEMA),
        "allowed tokens": greedy(TOKENS, allowed_token_ids=list(range(10, 900))),
        "three tokens": greedy(3, ignore_eos=True),
    }
    if not USES_V2:  # n answers of one request need top-k here
        kinds["three of one"] = SamplingParams(n=3, top_k=1, max_tokens=TOKENS)
        kinds["drawn, two of one"] = drawn(3, n=2)
    asked = [
        Asked(name, texts[number][:40], params)
        for number, (name, params) in enumerate(kinds.items())
    ]
    short = texts[0][:20]
    asked[3:3] = [
        Asked("repeats itself", short + short, greedy(TOKENS, ignore_eos=True)),
        Asked("in no order", secret(1, 30), greedy(TOKENS, ignore_eos=True)),
        Asked(f"one before {limit}", long[7 : 6 + limit], greedy(TOKENS, ignore_eos=True)),
        Asked(f"six before {limit}", long[3 : limit - 3], greedy(TOKENS, ignore_eos=True)),
        Asked("repeats itself, drawn", short + short, drawn(4)),
    ]
    return asked


def victims(limit: int) -> dict[str, Asked]:
    """Return requests that hang up: one in its prompt, one while it is answered."""
    params = greedy(limit, ignore_eos=True)
    return {
        "in its prompt": Asked("hangs up in its prompt", secret(2, limit - 8), params),
        "answered": Asked("hangs up while answered", secret(3, 12), params),
    }


def serve(llm: LLM, asked: list[Asked], leaving: dict[str, Asked], has_priorities: bool) -> Answers:
    """Serve all requests, those that leave first in the queue, until none is left."""
    core, answers = llm.llm_engine, Answers()
    waiting = {one.name: stage for stage, one in leaving.items()}
    for number, one in enumerate([*leaving.values(), *asked]):
        priority = number % 3 if has_priorities and one.name not in waiting else 0
        prompt: Any = {"prompt_token_ids": one.prompt}
        core.add_request(one.name, prompt, one.params.clone(), priority=priority)
    for _ in steps(llm):
        for output in core.step():
            if output.finished:
                answers.by_name[output.request_id] = output
        for name, stage in [*waiting.items()]:
            if is_at(llm, name, stage):
                core.abort_request([name])
                answers.hung_up.add(name)
                del waiting[name]
    return answers


def steps(llm: LLM, most: int = 4000) -> Iterator[int]:
    """Yield steps while there is anything to do; fail after `most`."""
    for number in range(most):
        if not llm.llm_engine.has_unfinished_requests():
            return
        yield number
    raise AssertionError(f"not done after {most} steps")


def is_at(llm: LLM, name: str, stage: str) -> bool:
    """Return whether it is time for this request to leave."""
    of_stage: dict[str, Callable[[Any], bool]] = {
        "in its prompt": lambda request: request.num_computed_tokens > 0,
        "answered": lambda request: request.num_output_tokens > 4,
    }
    requests = scheduler_of(llm).requests.items()
    return any(of_stage[stage](one) for key, one in requests if key.rpartition("-")[0] == name)
