"""Tool calls that a real server streams, with drafts and without them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from support.engines import DRAFTER, TARGET
from support.servers import MODEL, Server, serving

pytestmark = pytest.mark.slow  # another server
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
QUESTION = [{"role": "user", "content": f"Write this: {CALL} {CALL}"}]
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


def body(path: str, choice: str, length: int) -> dict[str, Any]:
    """A request for one tool call, streamed."""
    tool: dict[str, Any] = {"name": "get_weather"}
    if path == "/v1/messages":
        tool |= {"input_schema": PARAMETERS}
        chosen: Any = {"type": "any"} if choice == "required" else {"type": "tool", **tool}
        chosen.pop("input_schema", None)
        return {"messages": QUESTION, "tools": [tool], "tool_choice": chosen, "max_tokens": length}
    tool |= {"parameters": PARAMETERS}
    named: Any = {"type": "function", "name": "get_weather"}
    if path == "/v1/responses":
        asked = {"input": QUESTION, "tools": [{"type": "function", **tool}]}
        return asked | {
            "tool_choice": choice if choice == "required" else named,
            "max_output_tokens": length,
        }
    named = {"type": "function", "function": {"name": "get_weather"}}
    return {
        "messages": QUESTION,
        "tools": [{"type": "function", "function": tool}],
        "tool_choice": choice if choice == "required" else named,
        "max_tokens": length,
    }


def arguments_of(event: dict[str, Any]) -> str:
    """What this event adds to the arguments of a call, in each of the three protocols."""
    if event.get("type") == "response.function_call_arguments.delta":
        return str(event["delta"])
    delta = event.get("delta")
    if isinstance(delta, dict):
        return delta.get("partial_json") or ""
    choices = event.get("choices") or [{"delta": {}}]
    calls = choices[0]["delta"].get("tool_calls") or []
    return "".join(call["function"].get("arguments") or "" for call in calls)


def reason_of(event: dict[str, Any]) -> str:
    choices = event.get("choices") or [{}]
    delta = event.get("delta")
    stop = delta.get("stop_reason") if isinstance(delta, dict) else None
    done = event["response"]["status"] if event.get("type") == "response.completed" else None
    return choices[0].get("finish_reason") or stop or done or ""


def streamed(server: Server, path: str, choice: str, length: int, drafts: int) -> tuple[str, str]:
    """Arguments and finish reason that a client puts together."""
    asked = body(path, choice, length) | {"model": MODEL, "stream": True, "temperature": 0.0}
    asked |= {"vllm_xargs": {"dflash.max_drafts": drafts}}
    arguments = reason = ""
    with httpx.stream("POST", server.url + path, json=asked, timeout=120) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                arguments += arguments_of(event)
                reason = reason_of(event) or reason
    return arguments, reason


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("choice", ["required", "named"])
def test_streamed_calls_are_those_without_drafts(server: Server, path: str, choice: str) -> None:
    lengths = range(SHORTEST, LONGEST)
    before = server.metric("vllm:spec_decode_num_accepted_tokens_total")
    drafted = [streamed(server, path, choice, length, 7) for length in lengths]
    assert server.metric("vllm:spec_decode_num_accepted_tokens_total") > before
    assert drafted == [streamed(server, path, choice, length, 0) for length in lengths]
    assert any(arguments for arguments, _ in drafted)
