"""How models write tool calls and reasoning, by the name of vLLM's parser; written by hand.

One dialect of each kind: the fix that they test knows no parser.
"""

# ruff: noqa: RUF001

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Arguments = dict[str, Any]
Call = tuple[str, Arguments]
Writer = Callable[[str, Arguments], str]


@dataclass(frozen=True)
class ToolFormat:
    """One format: a list of calls is `begin`, the calls with `between`, and `end`."""

    write: Writer
    begin: str = ""
    between: str = "\n"
    end: str = ""
    special: str = ""
    """Texts that are one token each, separated by spaces."""
    reasoning: tuple[str, ...] = ()
    """Reasoning parsers to try beside it."""
    after_text: bool = True
    """Whether calls may follow text."""

    def of(self, *calls: Call) -> str:
        """An answer that makes these calls."""
        return self.begin + self.between.join(self.write(*call) for call in calls) + self.end


def as_json(template: str, key: str = "arguments") -> Writer:
    """Writer of a call as one JSON object, in place of the @."""
    return lambda tool, given: template.replace("@", json.dumps({"name": tool, key: given}))


def as_tags(call: str, parameter: str) -> Writer:
    """Writer of a call from templates with NAME, PARAMETERS, KEY and VALUE."""

    def write(tool: str, given: Arguments) -> str:
        parts = [
            parameter.replace("KEY", key).replace("VALUE", str(value))
            for key, value in given.items()
        ]
        return call.replace("NAME", tool).replace("PARAMETERS", "".join(parts))

    return write


def as_text(template: str) -> Writer:
    """Writer of a call from a template with NAME and JSON."""
    return lambda tool, given: template.replace("NAME", tool).replace("JSON", json.dumps(given))


def as_python(tool: str, given: Arguments) -> str:
    """Write a call in Python."""
    return f"{tool}({', '.join(f'{key}={value!r}' for key, value in given.items())})"


def as_pairs(template: str, quote: str) -> Writer:
    """Writer of a call from a template with NAME and PAIRS; marks around strings."""

    def write(tool: str, given: Arguments) -> str:
        marks = {key: quote if isinstance(given[key], str) else "" for key in given}
        pairs = ",".join(f"{key}:{mark}{given[key]}{mark}" for key, mark in marks.items())
        return template.replace("NAME", tool).replace("PAIRS", pairs)

    return write


FORMATS: dict[str, ToolFormat] = {
    "hermes": ToolFormat(
        as_json("<tool_call>\n@\n</tool_call>"),
        special="<tool_call> </tool_call> <think> </think>",
        reasoning=("deepseek_r1", "granite"),
    ),
    "llama3_json": ToolFormat(
        as_json("@", "parameters"), between="; ", special="<|python_tag|>", after_text=False
    ),
    "hunyuan_a13b": ToolFormat(
        as_json("@"), "<tool_calls>[", ", ", "]</tool_calls>", reasoning=("hunyuan_a13b",)
    ),
    "deepseek_v31": ToolFormat(
        as_text("<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>JSON<｜tool▁call▁end｜>"),
        "<｜tool▁calls▁begin｜>",
        "",
        "<｜tool▁calls▁end｜>",
        special="<｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜>"
        " <｜tool▁call▁end｜> <｜tool▁sep｜> <think> </think>",
        reasoning=("deepseek_v3",),
    ),
    "qwen3_coder": ToolFormat(
        as_tags(
            "<tool_call>\n<function=NAME>\nPARAMETERS</function>\n</tool_call>",
            "<parameter=KEY>\nVALUE\n</parameter>\n",
        ),
        special="<tool_call> </tool_call> <think> </think>",
        reasoning=("qwen3",),
    ),
    "pythonic": ToolFormat(as_python, "[", ", ", "]", after_text=False),
    "gemma4": ToolFormat(
        as_pairs("<|tool_call>call:NAME{PAIRS}<tool_call|>", '<|"|>'),
        special='<|tool_call> <tool_call|> <|"|> <|channel> <channel|> <|tool_response>',
        reasoning=("gemma4",),
    ),
    "step3": ToolFormat(
        as_tags(
            '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME">PARAMETERS'
            "</steptml:invoke><｜tool_call_end｜>",
            '<steptml:parameter name="KEY">VALUE</steptml:parameter>',
        ),
        "<｜tool_calls_begin｜>",
        end="<｜tool_calls_end｜>",
        special="<｜tool_calls_begin｜> <｜tool_calls_end｜> <｜tool_call_begin｜>"
        " <｜tool_call_end｜> <｜tool_sep｜> <think> </think>",
        reasoning=("step3",),
    ),
    "minicpm5": ToolFormat(
        as_tags('<function name="NAME">PARAMETERS</function>', '<param name="KEY">VALUE</param>')
    ),
    "muse_glimmer": ToolFormat(
        as_tags(
            '<|start|>assistant to=NAME<|message|><atem:function_calls>\n<atem:invoke name="NAME">'
            "\nPARAMETERS</atem:invoke>\n</atem:function_calls><|eom|>",
            '<atem:parameter name="KEY">VALUE</atem:parameter>\n',
        ),
        between="",
        special="<|start|> <|message|> <|eom|> <|eot|>",
        after_text=False,
        reasoning=("muse_glimmer",),
    ),
}

REASONING_MARKS = {
    "gemma4": ("<|channel>thought\n", "<channel|>"),
    "granite": ("Here is my thought process:", " Here is my response:"),
    "hunyuan_a13b": ("<think>\n", "\n</think>\n<answer>\n"),
    "muse_glimmer": ("to=self<|message|>", "<|eom|>"),
}
"""What stands around reasoning, by its parser; <think> and </think> by the others."""
