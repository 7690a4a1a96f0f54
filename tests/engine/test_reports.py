"""Requests from public bug reports: each gets plain decoding's answer and changes no other's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from vllm import LLM, SamplingParams
from vllm.v1.engine import EngineCoreRequest

from support.crossed_requests import REASONING, THINKS
from support.engines import (
    DFLASH,
    FIXED,
    SCHEDULING,
    USES_V2,
    engine,
    fix_costs,
    greedy,
    held_out_prompts,
    slow_on_v2,
    token_ids,
)

pytestmark = pytest.mark.usefixtures("runner")
TOKENS = 8 if USES_V2 else 24
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 96,
    "reasoning_config": REASONING,
}
ONE_DRAFT = {**FIXED, "num_speculative_tokens": 1}
BUDGETS = (None, 0), (None, 0, None), (None, 4, None, 6), (4, None)
SCORED = [5, 9, 260], [261], [300, 2]
ends_at = partial(greedy, TOKENS, ignore_eos=True)
Logprobs = list[dict[int, float]]


@dataclass
class Found:
    """Answers of an engine."""

    thinking: list[list[int]] = field(default_factory=list)
    in_chunks: list[list[int]] = field(default_factory=list)
    scored: list[Logprobs] = field(default_factory=list)
    likeliest: list[Logprobs] = field(default_factory=list)
    stopped: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """Tokens by prompt and `min_tokens`."""
    sessions: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """All tokens of a session, by where its first turn ends and how long the second's prompt is."""
    behind: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """Tokens of another request that has that session as its prefix."""


def find(llm: LLM, whole: list[list[int]]) -> Found:
    """Run all requests. `whole`: plain decoding's text of each prompt."""
    found = Found()
    encode = llm.get_tokenizer().encode
    for budgets in BUDGETS:
        prompts = [
            {"prompt_token_ids": encode(f"def f{i}(self):\n") + ([] if b is None else [THINKS])}
            for i, b in enumerate(budgets)
        ]
        found.thinking += token_ids(
            llm, prompts, [ends_at(thinking_token_budget=budget) for budget in budgets]
        )
    long = encode("".join(PROMPTS))[:150]  # in two chunks
    found.in_chunks = token_ids(
        llm, [{"prompt_token_ids": [*long, THINKS]}], ends_at(thinking_token_budget=0)
    )
    asked = [ends_at(logprob_token_ids=ids) for ids in SCORED]
    found.scored = [
        values(llm, [prompt], [one]) for prompt, one in zip(PROMPTS, asked, strict=False)
    ]
    beside = [ends_at(logprobs=2), ends_at()]
    found.likeliest = [values(llm, PROMPTS[4:5], beside[:1])]
    if llm.llm_engine.vllm_config.speculative_config is not None:
        # All at once. In plain decoding, neighbours would change each other's values.
        outputs = llm.generate(PROMPTS[:5], [*asked, beside[1], beside[0]], use_tqdm=False)
        found.scored += [rows(output.outputs[0].logprobs) for output in outputs[:3]]
        found.likeliest += [rows(outputs[4].outputs[0].logprobs)]
    cases = [
        (number, least)
        for number, text in enumerate(whole)
        for least in range(1, TOKENS // 2)
        if text[least] not in text[:least]  # first seen just where min_tokens allows it
    ]
    params = [ends_at(stop_token_ids=[whole[n][least]], min_tokens=least) for n, least in cases]
    texts = token_ids(llm, [PROMPTS[number] for number, _ in cases], params)
    found.stopped = dict(zip(cases, texts, strict=True))
    first, second = (encode(prompt)[:40] for prompt in PROMPTS[:2])
    text = token_ids(llm, [{"prompt_token_ids": first}], ends_at())[0]
    for place in range(2, TOKENS // 2, 2 if USES_V2 else 1):
        for length in (40,) if USES_V2 else (1, 40):
            stop = ends_at(stop_token_ids=[text[place]])
            key = place, length
            found.sessions[key] = session(llm, f"s{key}", [first, second[:length]], stop)
            prompt = first + found.sessions[key][:-1]
            found.behind[key] = token_ids(llm, [{"prompt_token_ids": prompt}], ends_at())[0]
    return found


def rows(logprobs: Any) -> Logprobs:
    return [{token: one.logprob for token, one in row.items()} for row in logprobs]


def values(llm: LLM, prompts: list[str], params: list[SamplingParams]) -> Logprobs:
    [output] = llm.generate(prompts, params, use_tqdm=False)
    return rows(output.outputs[0].logprobs)


def session(llm: LLM, name: str, chunks: list[list[int]], params: SamplingParams) -> list[int]:
    """Return all tokens of a session: each chunk of its prompt follows the last turn's text."""
    core, tasks = llm.llm_engine.engine_core, llm.supported_tasks
    tokens: list[int] = []

    def ask(chunk: list[int], *, goes_on: bool) -> EngineCoreRequest:
        return llm.llm_engine.input_processor.process_inputs(
            name, {"prompt_token_ids": [*chunk]}, params.clone(), tasks, resumable=goes_on
        )

    for chunk in chunks:
        core.add_request(ask(chunk, goes_on=True))
        for _ in range(500):
            ended = False
            for output in core.get_output().outputs:
                tokens += output.new_token_ids
                ended |= output.finish_reason is not None
            if ended:
                break
        else:
            raise AssertionError(f"turn {chunk} has no end")
    core.add_request(ask([0], goes_on=False))
    core.get_output()
    return tokens


PROMPTS = held_out_prompts(5 if USES_V2 else 12)


@pytest.fixture(scope="module")
def plain() -> tuple[list[list[int]], Found]:
    with engine(**SETTINGS) as llm:
        whole = token_ids(llm, PROMPTS, ends_at())
        return whole, find(llm, whole)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((way, name), marks=slow_on_v2 if way == "synchronous" else [])
        for way in SCHEDULING
        for name in (("adaptive",) if USES_V2 else ("adaptive", "one draft"))
    ],
    ids=", ".join,
)
def ours(
    request: pytest.FixtureRequest, plain: tuple[list[list[int]], Found]
) -> Iterator[tuple[LLM, Found]]:
    way, name = request.param
    with pytest.MonkeyPatch.context() as patch:
        fix_costs(patch)
        speculative = DFLASH if name == "adaptive" else ONE_DRAFT
        with engine(way, speculative_config=speculative, **SETTINGS) as llm:
            yield llm, find(llm, plain[0])


@pytest.mark.parametrize("what", ["thinking", "in_chunks", "stopped", "sessions", "behind"])
def test_tokens_are_plain_decodings(
    ours: tuple[LLM, Found], plain: tuple[list[list[int]], Found], what: str
) -> None:
    assert getattr(ours[1], what) == getattr(plain[1], what)


def test_budgets_end_their_own_thinking(plain: tuple[list[list[int]], Found]) -> None:
    """Otherwise comparing them would mean nothing."""
    budgets = [budget for together in BUDGETS for budget in together]
    for budget, text in zip(budgets, plain[1].thinking, strict=True):
        assert budget is None or text[budget] == 3
    assert plain[1].in_chunks[0][0] == 3
    whole, found = plain
    for (number, least), text in found.stopped.items():
        assert text == whole[number][: least + 1]
    assert len(found.stopped) > 2 * len(PROMPTS)


def test_scored_tokens_are_plain_decodings(
    ours: tuple[LLM, Found], plain: tuple[list[list[int]], Found]
) -> None:
    """Also beside requests that want other tokens scored, the likeliest ones, or none."""
    for found, wanted in (
        (ours[1].scored, plain[1].scored),
        (ours[1].likeliest, plain[1].likeliest),
    ):
        assert len(found) == 2 * len(wanted)
        for ours_, plains in zip(found, [*wanted, *wanted], strict=True):
            assert len(ours_) == len(plains) == TOKENS
            for got, expected in zip(ours_, plains, strict=True):
                assert got == pytest.approx(expected, abs=1e-4)
