"""Answers with tool calls as vLLM's server parses them, streamed in pieces of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import cast

from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from vllm import SamplingParams
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.streaming_events import split_delta
from vllm.parser import ParserManager
from vllm.parser.abstract_parser import Parser
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

from support import DEMO
from support.tool_dialects import FORMATS

PARAMETERS = {
    "get_weather": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "get_time": {"zone": {"type": "string"}},
    "now": {},
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": properties}},
    }
    for name, properties in PARAMETERS.items()
]


@cache
def tokenizer_of(tool_parser: str) -> PreTrainedTokenizerBase:
    """The demo target's tokenizer, with the tokens that this parser looks for."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "target")
    names = FORMATS[tool_parser].special.split()
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in names])
    return cast("PreTrainedTokenizerBase", tokenizer)


def asked() -> ChatCompletionRequest:
    """Return a chat request with three tools."""
    return ChatCompletionRequest(
        messages=[{"role": "user", "content": "?"}], tools=TOOLS, tool_choice="auto"
    )


@dataclass
class Conversation:
    """One answer to one request, and the parsers that a server was started with."""

    text: str
    tool_parser: str
    reasoning_parser: str | None = None
    length: int | None = None
    """Where `max_tokens` ends it; by default its end of turn does."""

    def __post_init__(self) -> None:
        self.tokenizer = tokenizer_of(self.tool_parser)
        kind = ParserManager.get_parser(self.tool_parser, self.reasoning_parser, True)
        assert kind is not None
        self.kind: type[Parser] = kind
        self.request = self.parser().adjust_request(asked())
        self.tokens: list[int] = self.tokenizer.encode(self.text, add_special_tokens=False)
        self.tokens.append(self.tokenizer.convert_tokens_to_ids("<|im_end|>"))
        if self.length is not None:
            del self.tokens[self.length :]

    def parser(self) -> Parser:
        return self.kind(self.tokenizer, asked().tools)

    def items(self, lengths: list[int]) -> list[tuple[str, str]]:
        """The output items that `/v1/responses` makes of pieces of these lengths, of which the last
        repeats, in order: kind and text."""
        parser, found = self.parser(), list[tuple[str, str]]()
        for ids, text, finished in self._pieces(lengths):
            delta = parser.parse_delta(text, ids, self.request, [1], finished=finished)
            for one in [] if delta is None else split_delta(delta):
                for kind, more in _parts(one):
                    if found and found[-1][0] == kind:
                        found[-1] = kind, found[-1][1] + more
                    else:
                        found.append((kind, more))
        return found

    def _pieces(self, lengths: list[int]) -> list[tuple[list[int], str, bool]]:
        """Tokens, text and whether it is the last, as vLLM's output processor makes them."""
        params = SamplingParams(
            skip_special_tokens=self.request.skip_special_tokens,
            spaces_between_special_tokens=self.request.spaces_between_special_tokens,
        )
        reader = FastIncrementalDetokenizer(
            self.tokenizer,
            SimpleNamespace(sampling_params=params, prompt_token_ids=[1], request_id="it"),
        )
        pieces, start, left = [], 0, [*lengths]
        while start < len(self.tokens):
            length = left.pop(0) if len(left) > 1 else left[0]
            ids = self.tokens[start : start + length]
            start += length
            finished = start >= len(self.tokens)
            reader.update(ids, finished and self.length is None)
            pieces.append((ids, reader.get_next_output_text(finished, True), finished))
        return pieces


def _parts(delta: DeltaMessage) -> list[tuple[str, str]]:
    """What a message has one of: kind and text."""
    parts = [("reasoning", delta.reasoning or ""), ("text", delta.content or "")]
    for call in delta.tool_calls or ():
        made = call.function
        parts.append((f"call {call.index}", (made and made.arguments) or ""))
        if made and made.name:
            parts[-1] = parts[-1][0], f"{made.name} {parts[-1][1]}"
    return [(kind, text) for kind, text in parts if text or kind.startswith("call")]
