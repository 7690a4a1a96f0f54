"""An answer with tool calls reads the same, whatever number of tokens arrives at once."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from packaging.version import Version
from vllm import SamplingParams
from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
)
from vllm.parser.abstract_parser import DelegatingParser
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from support.pairs import Pair
from support.streamed_answers import Answer, Conversation
from support.tool_dialects import FORMATS, REASONING_MARKS
from vllm_dflash.engine.vllm_fixes.streamed_pieces import StreamedText, parse_token_by_token

WEATHER = ("get_weather", {"city": "Paris", "days": 3})
TIME = ("get_time", {"zone": "Europe/Paris"})
NOW: tuple[str, dict[str, Any]] = ("now", {})
CUTS = [[1, 2], [2, 3], [3, 3], [1, 8], [4, 8], [7, 8], [8, 8]]
"""Tokens of the first piece, and of each later one."""
BREAK = FORMATS.keys() - {"qwen3_coder", "gemma4", "muse_glimmer"}
"""Tool parsers of vLLM 0.32 that depend on how an answer is cut."""
REASONING_BREAK = {"deepseek_r1", "gemma4", "granite", "hunyuan_a13b"}
"""Reasoning parsers of vLLM 0.32 that do."""

only_where_listed = pytest.mark.skipif(
    Version(vllm.__version__).release[:2] != (0, 32), reason="the lists are vLLM 0.32's"
)


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


def conversations(tool_parser: str) -> Iterator[Conversation]:
    """Answers with one call, several, none, without arguments, after text, and unfinished."""
    form = FORMATS[tool_parser]
    texts = [form.of(WEATHER), form.of(NOW), "It rains, now.", form.of(WEATHER, TIME)]
    texts += ["I look it up. " + form.of(WEATHER)] if form.after_text else []
    for text in texts:
        yield Conversation(text, tool_parser)
    for length in range(6, len(Conversation(texts[0], tool_parser).tokens), 5):
        yield Conversation(texts[0], tool_parser, length=length)


def thoughts(tool_parser: str, reasoning_parser: str, *then: str) -> Iterator[Conversation]:
    """Answers with reasoning, which may have begun in the prompt, before each of these texts."""
    begin, end = REASONING_MARKS.get(reasoning_parser, ("<think>", "</think>"))
    for after in then:
        for before in (begin, "", begin + "\n"):
            text = f"{before}It rains.{end}{after}"
            yield Conversation(text, tool_parser, reasoning_parser)


def changed(answers: Iterator[Conversation]) -> list[tuple[str, list[int], Answer | Exception]]:
    """Texts and cuts with which a client does not get what it gets token by token."""
    found = []
    for answer in answers:
        plain = answer.streamed([1])
        got = ((cut, streamed(answer, cut)) for cut in CUTS)
        found += [(answer.text, cut, one) for cut, one in got if one != plain]
    return found


def streamed(answer: Conversation, cut: list[int]) -> Answer | Exception:
    try:
        return answer.streamed(cut)
    except AssertionError as error:  # of the parser; a server ends the stream with an error
        return error


UMBRELLA = "Take an umbrella."
PAIRS = [(tools, name) for tools, form in FORMATS.items() for name in form.reasoning]


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_what_the_parsers_read(name: str) -> None:
    """Not streamed: otherwise all below would compare texts without calls."""
    whole = Conversation(FORMATS[name].of(WEATHER), name).whole()
    assert [call[0] for call in whole.calls] == ["get_weather"]


@only_where_listed
@pytest.mark.usefixtures("vllms_own")
@pytest.mark.parametrize("name", FORMATS)
def test_tool_parsers_that_break_in_vllm(name: str) -> None:
    """If one is mended: take it from the list, from compatibility.md and from upstream.md."""
    assert bool(changed(conversations(name))) == (name in BREAK)


@only_where_listed
@pytest.mark.usefixtures("vllms_own")
@pytest.mark.parametrize(("tools", "name"), PAIRS)
def test_reasoning_parsers_that_break_in_vllm(tools: str, name: str) -> None:
    assert bool(changed(thoughts(tools, name, UMBRELLA))) == (name in REASONING_BREAK)


@pytest.mark.usefixtures("ours")
@pytest.mark.parametrize("name", FORMATS)
def test_tool_calls_do_not_depend_on_drafts(name: str) -> None:
    assert changed(conversations(name)) == []


@pytest.mark.usefixtures("ours")
@pytest.mark.parametrize(("tools", "name"), PAIRS)
def test_reasoning_does_not_depend_on_drafts(tools: str, name: str) -> None:
    assert changed(thoughts(tools, name, UMBRELLA, FORMATS[tools].of(WEATHER))) == []


@pytest.mark.parametrize(
    ("tool_parser", "length", "arguments"),
    [("step3", None, '{"city": "Paris", "days": 3}'), ("hermes", 14, "")],
)
def test_surplus_arguments(
    vllms_own: None, tool_parser: str, length: int | None, arguments: str
) -> None:
    """vLLM adds what a parser has not sent to the last message, if that has a call in it."""
    del vllms_own
    answer = Conversation(FORMATS[tool_parser].of(WEATHER), tool_parser, length=length)
    right, wrong = (("get_weather", arguments),), (("get_weather", arguments + "{}"),)
    assert {answer.streamed([first, 3]).calls for first in (1, 2, 3)} == {right, wrong}
    parse_token_by_token()
    assert {answer.streamed([first, 3]).calls for first in (1, 2, 3)} == {right}


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


AROUND = " It rains in Paris, and I look it up once more, and again. "


@pytest.mark.usefixtures("ours")
@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.after_text])
def test_calls_and_text_come_in_order(name: str) -> None:
    """Text behind a call, and between two, is an item of its own in `/v1/responses`."""
    form = FORMATS[name]
    once = form.of(WEATHER) + AROUND
    for text in (once, once + form.of(TIME) + AROUND):
        answer = Conversation(text, name)
        assert [answer.items(cut) for cut in CUTS] == [answer.items([1])] * len(CUTS)


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
