"""Tool calls that a real server streams, with drafts and without them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from support.engines import DRAFTER, TARGET
from support.servers import MODEL, Server, serving

pytestmark = pytest.mark.slow  # another server
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
QUESTION: Any = [{"role": "user", "content": f"Write this: {CALL} {CALL}"}]
"""The call is drafted from the question's text."""
SHORTEST, LONGEST = 8, 32
"""Tokens of an answer: those that end in a call are where vLLM adds what it has not sent."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    drafts = {"method": "dflash", "model": str(DRAFTER)}
    arguments = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--dtype", "float32"]
    arguments += ["--enforce-eager", "--speculative-config", json.dumps(drafts)]
    with serving(log, TARGET, *arguments) as ready:
        yield ready


def streamed(server: Server, choice: Any, length: int, drafts: int) -> tuple[str, str | None]:
    """Arguments and finish reason that a client puts together."""
    tools: Any = [
        {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
    ]
    arguments, reason = "", None
    stream: Any = server.client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        tools=tools,
        tool_choice=choice,
        max_tokens=length,
        temperature=0.0,
        stream=True,
        extra_body={"vllm_xargs": {"dflash.max_drafts": drafts}},
    )
    for chunk in stream:
        for one in chunk.choices:
            calls = one.delta.tool_calls or []
            arguments += "".join(call.function.arguments or "" for call in calls)
            reason = one.finish_reason or reason
    return arguments, reason


NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_streamed_calls_are_those_without_drafts(server: Server, choice: Any) -> None:
    lengths = range(SHORTEST, LONGEST)
    before = server.metric("vllm:spec_decode_num_accepted_tokens_total")
    drafted = [streamed(server, choice, length, 7) for length in lengths]
    assert server.metric("vllm:spec_decode_num_accepted_tokens_total") > before
    assert drafted == [streamed(server, choice, length, 0) for length in lengths]
    assert any(arguments for arguments, _ in drafted)
