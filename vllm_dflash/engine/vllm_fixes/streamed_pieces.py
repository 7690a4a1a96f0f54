"""Parsers of streamed tool calls and reasoning depend on how many tokens arrive at once.

Delete this file when none of them does (docs/engineering/upstream.md#streamed_piecespy).
"""

from __future__ import annotations

from functools import wraps
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from vllm import SamplingParams
from vllm.parser.abstract_parser import DelegatingParser
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer, IncrementalDetokenizer

if TYPE_CHECKING:
    from vllm.entrypoints.generate.base.protocol import DeltaMessage
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

STATE = "_vllm_dflash_text"
"""Attribute of a parser, which serves one answer: our `StreamedText`."""


def parse_token_by_token() -> None:
    """Give parsers of streamed answers one token in each call (hook "streamed pieces")."""
    parse_delta = DelegatingParser.parse_delta
    if hasattr(parse_delta, "wrapped_by_vllm_dflash"):
        return

    @wraps(parse_delta)
    def parse_pieces(
        self: DelegatingParser,
        delta_text: str,
        delta_token_ids: list[int],
        request: ChatCompletionRequest | ResponsesRequest,
        prompt_token_ids: list[int] | None = None,
        *,
        finished: bool,
    ) -> DeltaMessage | None:
        if not hasattr(self, STATE):
            setattr(self, STATE, StreamedText(self, request, prompt_token_ids))
        state: StreamedText = getattr(self, STATE)
        pieces = state.split(delta_text, delta_token_ids, finished)
        for at, (text, tokens) in enumerate(pieces, 1):
            ends = finished and at == len(pieces)
            delta = parse_delta(self, text, tokens, request, prompt_token_ids, finished=ends)
            if delta is not None:
                state.unsent.append(delta)
        return state.next_message(finished)

    parse_pieces.wrapped_by_vllm_dflash = True  # type: ignore[attr-defined]
    DelegatingParser.parse_delta = parse_pieces


def merge(before: DeltaMessage, after: DeltaMessage) -> None:
    """Add a message to the one before it."""
    if after.reasoning:
        before.reasoning = (before.reasoning or "") + after.reasoning
    if after.content:
        before.content = (before.content or "") + after.content
    for call in after.tool_calls or ():
        last = before.tool_calls[-1] if before.tool_calls else None
        more = call.function.arguments if call.function else None
        if last is None or last.function is None or last.index != call.index or call.id:
            before.tool_calls = [*(before.tool_calls or ()), call]
        elif more:
            last.function.arguments = (last.function.arguments or "") + more


class StreamedText:
    """Where each token of an answer ends in its text, and what was parsed and not sent."""

    def __init__(
        self,
        parser: DelegatingParser,
        request: ChatCompletionRequest | ResponsesRequest,
        prompt_token_ids: list[int] | None,
    ) -> None:
        params = SamplingParams(
            skip_special_tokens=request.skip_special_tokens,
            spaces_between_special_tokens=getattr(request, "spaces_between_special_tokens", True),
        )
        self.reader = IncrementalDetokenizer.from_new_request(
            parser.model_tokenizer,
            cast(
                "EngineCoreRequest",
                SimpleNamespace(
                    request_id="",
                    sampling_params=params,
                    prompt_token_ids=prompt_token_ids,
                    prompt_embeds=None,
                ),
            ),
        )
        self.unsent: list[DeltaMessage] = []
        self.received = 0  # characters
        stop = [request.stop] if isinstance(request.stop, str) else request.stop or [""]
        includes_stop = getattr(request, "include_stop_str_in_output", False)
        # Characters that vLLM keeps until the end, because they may begin a stop string.
        self.held_back = 0 if includes_stop else max(0, max(map(len, stop)) - 1)

    def split(self, text: str, tokens: list[int], finished: bool) -> list[tuple[str, list[int]]]:
        """Text and token of each token; one piece, if the text is not what these tokens say."""
        reader = self.reader
        if not isinstance(reader, BaseIncrementalDetokenizer):
            return [(text, tokens)]
        ends = []
        for token in tokens:
            reader.update([token], stop_terminated=False)
            ends.append(len(reader.output_text))
        start, self.received = self.received, self.received + len(text)
        if len(tokens) < 2 or reader.output_text[start : self.received] != text:
            return [(text, tokens)]
        cuts = [min(max(end - self.held_back - start, 0), len(text)) for end in ends[:-1]]
        pieces = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
        return [(piece, [token]) for piece, token in zip(pieces, tokens, strict=True)]

    def next_message(self, finished: bool) -> DeltaMessage | None:
        """Return one message for the unsent ones, so that clients get as many as without this file.

        `/v1/responses` sends the text of a message before its calls. So text that follows a call
        waits for the next message, unless the answer is `finished`.
        """
        if not self.unsent:
            return None
        first, *others = self.unsent
        for number, other in enumerate(others):
            if first.tool_calls and (other.content or other.reasoning) and not finished:
                self.unsent = others[number:]
                return first
            merge(first, other)
        self.unsent = []
        return first
