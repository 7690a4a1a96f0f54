"""Chats with two servers of one model, one of which drafts."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from openai.types.chat import ChatCompletion

from support.servers import MODEL, Server
from support.waiting import wait_until

Asked = str | list[Any]
"""A question, or messages."""


class Pair(NamedTuple):
    """Two servers of the same model."""

    plain: Server
    ours: Server
    drafts_always: bool
    """Whether our server drafts in every step, however busy the machine is."""

    def both(self, ask: Callable[[Server], Any]) -> tuple[Any, Any]:
        """Return the answers of plain decoding and ours, asked at the same time."""
        with ThreadPoolExecutor(2) as pool:
            plain, ours = pool.map(ask, (self.plain, self.ours))
        return plain, ours


def chat(server: Server, asked: Asked, **more: Any) -> Any:
    """Return an answer, or a stream of its chunks; greedy unless `more` has another temperature."""
    messages: Any = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    more = {"max_tokens": 48, "temperature": 0, **more}
    return server.client.chat.completions.create(model=MODEL, messages=messages, **more)


def streamed(server: Server, asked: Asked, **more: Any) -> dict[str, Any]:
    """Return the text of a stream, why it ended, and its number of tokens."""
    more |= {"stream": True, "stream_options": {"include_usage": True}}
    found: dict[str, Any] = {"text": ""}
    for chunk in chat(server, asked, **more):
        for choice in chunk.choices:
            found["text"] += choice.delta.content or ""
            found["reason"] = choice.finish_reason
        if chunk.usage is not None:
            found["tokens"] = chunk.usage.completion_tokens
    return found


def essence(answer: ChatCompletion) -> list[Any]:
    """Return what must not differ between servers: texts, calls, why they ended, token counts."""
    assert answer.usage is not None
    tokens = (answer.usage.prompt_tokens, answer.usage.completion_tokens)
    answers: list[Any] = []
    for choice in answer.choices:
        message = choice.message.model_dump()
        for call in message["tool_calls"] or []:
            del call["id"]
        answers.append((message, choice.finish_reason))
    return [tokens, *answers]


def text(answer: ChatCompletion) -> str:
    content = answer.choices[0].message.content
    assert content
    return content


class Verified(NamedTuple):
    """What was verified for one request, alone on its server."""

    answer: ChatCompletion
    drafts: float
    accepted: float

    @property
    def thrown_away(self) -> float:
        """Tokens after the last one kept; if any, that one was in the middle of its block.

        A step adds the drafts it accepts and one token; the prompt's step adds only the token.
        """
        assert self.answer.usage is not None
        return 1 + self.drafts + self.accepted - self.answer.usage.completion_tokens


def verified(server: Server, asked: Asked, **more: Any) -> Verified:
    names = ("generation_tokens", "spec_decode_num_drafts", "spec_decode_num_accepted_tokens")

    def read() -> list[float]:
        return [server.metric(f"vllm:{name}_total") for name in names]

    before = read()
    answer = chat(server, asked, **more)
    assert answer.usage is not None
    written = answer.usage.completion_tokens
    # A step's counts are published together, shortly after its tokens.
    wait_until(
        lambda: server.metric(f"vllm:{names[0]}_total") >= before[0] + written,
        "counts of the last step",
    )
    _, drafts, accepted = (now - then for now, then in zip(read(), before, strict=True))
    return Verified(answer, drafts, accepted)


def as_plain(pair: Pair, asked: Asked, **more: Any) -> Verified:
    """Return our answer; check that it is plain decoding's, and that drafts were accepted."""
    plain, ours = pair.both(lambda server: verified(server, asked, **more))
    assert essence(ours.answer) == essence(plain.answer)
    assert plain.drafts == 0
    assert ours.accepted > 0 or not pair.drafts_always
    return ours


def cached(answer: ChatCompletion) -> int:
    """Return the number of prompt tokens that were found in the cache."""
    assert answer.usage is not None
    details = answer.usage.prompt_tokens_details
    return (details.cached_tokens or 0) if details else 0
