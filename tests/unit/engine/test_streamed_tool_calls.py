"""An answer with tool calls reads the same, whatever number of tokens arrives at once."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
)
from vllm.parser.abstract_parser import DelegatingParser
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from support.pairs import Pair
from support.streamed_answers import Conversation
from support.tool_dialects import FORMATS
from vllm_dflash.engine.vllm_fixes.streamed_pieces import StreamedText, parse_token_by_token

WEATHER = ("get_weather", {"city": "Paris", "days": 3})
TIME = ("get_time", {"zone": "Europe/Paris"})
NOW: tuple[str, dict[str, Any]] = ("now", {})
CUTS = [[1, 2], [1, 3], [2, 3], [3, 3], [1, 8], [4, 8], [7, 8], [8, 8]]
"""Tokens of the first piece, and of each later one."""
THINKING_PARSER = "hy_v4"
AROUND = " It rains in Paris, and I look it up once more, and again. "


@pytest.fixture
def vllms_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's parsers without our hook, whatever tests ran before."""
    own = inspect.unwrap(DelegatingParser.parse_delta)
    monkeypatch.setattr(DelegatingParser, "parse_delta", own)


@pytest.fixture
def ours(vllms_own: None) -> None:
    """vLLM's parsers with our hook; the first fixture takes it back."""
    del vllms_own
    parse_token_by_token()


def changed(*answers: Conversation) -> list[tuple[str, list[int]]]:
    """Texts and cuts with which a client does not get what it gets token by token."""
    return [
        (answer.text, cut)
        for answer in answers
        for plain in [answer.items([1])]
        for cut in CUTS
        if answer.items(cut) != plain
    ]


@pytest.mark.usefixtures("ours")
@pytest.mark.parametrize("name", FORMATS)
def test_tool_calls_do_not_depend_on_drafts(name: str) -> None:
    """Answers with one call, several, none, without arguments, after text and before it, and
    unfinished ones, come in pieces of any size. vLLM adds what a parser has not sent to the last
    message, if that has a call in it:
    a surplus `{}` in some cuts."""
    form = FORMATS[name]
    one = Conversation(form.of(WEATHER), name)
    assert one.items([1]) == [("call 0", 'get_weather {"city": "Paris", "days": 3}')]
    text_behind = form.of(WEATHER) + AROUND
    texts = [form.of(NOW), form.of(WEATHER, TIME), "It rains, now.", AROUND + form.of(WEATHER)]
    texts += [text_behind, text_behind + form.of(TIME) + AROUND]
    unfinished = [
        Conversation(one.text, name, length=length) for length in range(6, len(one.tokens), 4)
    ]
    assert changed(one, *(Conversation(text, name) for text in texts), *unfinished) == []


@pytest.mark.usefixtures("ours")
def test_reasoning_does_not_depend_on_drafts() -> None:
    """It may have begun in the prompt, and a call may follow."""
    assert (
        changed(
            *(
                Conversation(f"{before}It rains.</think>{after}", THINKING_PARSER, THINKING_PARSER)
                for after in ("Take an umbrella.", FORMATS[THINKING_PARSER].of(WEATHER))
                for before in ("<think>", "", "<think>\n")
            )
        )
        == []
    )


def call(index: int, arguments: str, name: str | None = None) -> DeltaToolCall:
    made = DeltaFunctionCall(name=name, arguments=arguments)
    return DeltaToolCall(id=f"of {index}" if name else None, index=index, function=made)


def messages(*deltas: DeltaMessage, finished: bool) -> list[DeltaMessage]:
    """Return what a client gets for messages that were parsed at once, and one more piece."""
    answer = Conversation("It rains.", "hermes")
    text = StreamedText(answer.parser(), answer.request, [1])
    text.unsent = [*deltas]
    found = [text.next_message(finished), text.next_message(True)]
    return [one for one in found if one is not None]


def test_one_message_for_several() -> None:
    deltas = (
        DeltaMessage(reasoning="It "),
        DeltaMessage(reasoning="rains.", content="I "),
        DeltaMessage(content="look.", tool_calls=[call(0, "", "get_time")]),
        DeltaMessage(tool_calls=[call(0, '{"zone"')]),
        DeltaMessage(tool_calls=[call(0, ": 1}"), call(1, "{", "now")]),
        DeltaMessage(tool_calls=[call(1, "}")]),
    )
    (whole,) = messages(*deltas, finished=False)
    assert (whole.reasoning, whole.content) == ("It rains.", "I look.")
    assert whole.tool_calls == [call(0, '{"zone": 1}', "get_time"), call(1, "{}", "now")]
    assert messages(finished=False) == []


@pytest.mark.parametrize("finished", [False, True])
def test_text_behind_a_call_is_in_the_next_message(finished: bool) -> None:
    """vLLM sends the text of a message before its calls. Behind the last message there is none."""
    deltas = (
        DeltaMessage(tool_calls=[call(0, "{}", "now")]),
        DeltaMessage(content="It "),
        DeltaMessage(content="rains."),
    )
    found = [(one.content, len(one.tool_calls)) for one in messages(*deltas, finished=finished)]
    assert found == [("It rains.", 1)] if finished else [(None, 1), ("It rains.", 0)]


def text_by_token(cut: list[int], stop: list[str]) -> list[str]:
    """What a parser gets with each token, if `stop` is asked for. `cut`: tokens that arrive first,
    and each later time."""
    answer = Conversation("It rains in 東京 today, and it is cold.", "hermes")
    params = SamplingParams(stop=stop)
    request: Any = SimpleNamespace(sampling_params=params, prompt_token_ids=[1], request_id="")
    reader = IncrementalDetokenizer.from_new_request(answer.tokenizer, request)
    asked = answer.request.model_copy(update={"stop": stop})
    split = StreamedText(answer.parser(), asked, [1]).split
    found: list[str] = []
    left = answer.tokens
    while left:
        length = cut[bool(found)]
        ids, left = left[:length], left[length:]
        reader.update(ids, not left)
        pieces = split(reader.get_next_output_text(not left, delta=True), ids, not left)
        assert pieces == [*zip([text for text, _ in pieces], [[one] for one in ids], strict=True)]
        found += [text for text, _ in pieces]
    assert "".join(found) == answer.text
    return found


@pytest.mark.parametrize("stop", [[], ["is never seen"], ["never", "seen"]])
def test_texts_of_tokens(stop: list[str]) -> None:
    """Also if a character has several tokens, and if vLLM holds text back for stop strings."""
    plain = text_by_token([1, 1], stop)
    cuts = [[first, length] for first in range(1, 9) for length in (2, 3, 8, 40)]
    assert [text_by_token(cut, stop) for cut in cuts] == [plain] * len(cuts)


def test_other_text_is_handed_over_as_it_is() -> None:
    """For example that of a parser which rewrites it first."""
    answer = Conversation("It rains today.", "hermes")
    text = StreamedText(answer.parser(), answer.request, [1])
    other = "It\\nrains today."
    assert text.split(other, answer.tokens, True) == [(other, answer.tokens)]


def test_it_is_placed_with_an_engine_of_ours(vllms_own: None, pair: Pair) -> None:
    del vllms_own
    own = DelegatingParser.parse_delta
    pair.start(speculative_config=None)
    assert DelegatingParser.parse_delta is own
    pair.start()
    placed = DelegatingParser.parse_delta
    assert inspect.unwrap(placed) is own
    pair.start()
    assert DelegatingParser.parse_delta is placed is not own
