"""Requests from public bug reports: each gets plain decoding's answer and changes no other's."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from vllm import LLM, SamplingParams
from vllm.v1.engine import EngineCoreRequest

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
SETTINGS: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 96}
PROMPTS = held_out_prompts(5 if USES_V2 else 12)
Answers = dict[tuple[Any, ...], list[int]]
ends_at = partial(greedy, TOKENS, ignore_eos=True)


def stopped(llm: LLM, whole: list[list[int]]) -> Answers:
    """Return texts that end with a token first seen just where `min_tokens` allows it. `whole`:
    plain decoding's text of each prompt."""
    cases = [
        (number, least)
        for number, text in enumerate(whole)
        for least in range(1, TOKENS // 2)
        if text[least] not in text[:least]
    ]
    params = [ends_at(stop_token_ids=[whole[n][least]], min_tokens=least) for n, least in cases]
    texts = token_ids(llm, [PROMPTS[number] for number, _ in cases], params)
    return dict(zip(cases, texts, strict=True))


def sessions(llm: LLM) -> Answers:
    """Return all tokens of sessions, by where the first turn ends and how long the second's prompt
    is, and of another request that has a session as its prefix."""
    first, second = (llm.get_tokenizer().encode(prompt)[:40] for prompt in PROMPTS[:2])
    text = token_ids(llm, [{"prompt_token_ids": first}], ends_at())[0]
    found: Answers = {}
    for place in range(2, TOKENS // 2, 2 if USES_V2 else 1):
        for length in (40,) if USES_V2 else (1, 40):
            stop, key = ends_at(stop_token_ids=[text[place]]), (place, length)
            written = found[key] = session(llm, f"s{key}", [first, second[:length]], stop)
            behind = {"prompt_token_ids": first + written[:-1]}
            found[*key, "behind"] = token_ids(llm, [behind], ends_at())[0]
    return found


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
            outputs = core.get_output().outputs
            tokens += [token for output in outputs for token in output.new_token_ids]
            if any(output.finish_reason is not None for output in outputs):
                break
        else:
            raise AssertionError(f"turn {chunk} has no end")
    core.add_request(ask([0], goes_on=False))
    core.get_output()
    return tokens


@pytest.fixture(scope="module")
def plain() -> tuple[list[list[int]], Answers, Answers]:
    """Texts of plain decoding, and its answers."""
    with engine(**SETTINGS) as llm:
        whole = token_ids(llm, PROMPTS, ends_at())
        ended = stopped(llm, whole)
        assert ended == {(n, least): whole[n][: least + 1] for n, least in ended}
        assert len(ended) > 2 * len(PROMPTS)
        return whole, ended, sessions(llm)


@pytest.mark.parametrize(
    "draft_length",
    ["adaptive", *([] if USES_V2 else [pytest.param("one draft", marks=pytest.mark.slow)])],
)
@pytest.mark.parametrize(
    "way",
    [pytest.param(n, marks=slow_on_v2 if n == "synchronous" else []) for n in SCHEDULING],
)
def test_stop_tokens_and_sessions_are_plain_decodings(
    plain: tuple[list[list[int]], Answers, Answers],
    way: str,
    draft_length: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, *expected = plain
    fix_costs(monkeypatch)
    one = {**FIXED, "num_speculative_tokens": 1}
    speculative = DFLASH if draft_length == "adaptive" else one
    with engine(way, speculative_config=dict(speculative), **SETTINGS) as llm:
        assert [stopped(llm, whole), sessions(llm)] == expected
