"""How models write tool calls and reasoning, by the name of vLLM's parser; written by hand.

One of each kind, and of each way in which vLLM's parsers go wrong.
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
    after_text: bool = True
    """Whether calls may follow text."""

    def of(self, *calls: Call) -> str:
        """An answer that makes these calls."""
        return self.begin + self.between.join(self.write(*call) for call in calls) + self.end

    @property
    def tokens(self) -> list[str]:
        """Texts that are one token each."""
        return self.special.split()


def as_json(template: str, key: str = "arguments") -> Writer:
    """Writer of a call as one JSON object, in place of the @."""
    return lambda tool, given: template.replace(
        "@", json.dumps({"name": tool, key: given}, ensure_ascii=False)
    )


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def as_tags(call: str, parameter: str) -> Writer:
    """Writer of a call from templates with NAME, PARAMETERS, KEY and VALUE."""

    def write(tool: str, given: Arguments) -> str:
        parts = [
            parameter.replace("KEY", key).replace("VALUE", _value(value))
            for key, value in given.items()
        ]
        return call.replace("NAME", tool).replace("PARAMETERS", "".join(parts))

    return write


def as_python(tool: str, given: Arguments) -> str:
    """Write a call in Python."""
    return f"{tool}({', '.join(f'{key}={value!r}' for key, value in given.items())})"


def as_pairs(template: str, quote: str, number: str) -> Writer:
    """Writer of a call from a template with NAME and PAIRS; marks around strings and numbers."""

    def write(tool: str, given: Arguments) -> str:
        marks = {key: quote if isinstance(given[key], str) else number for key in given}
        pairs = ",".join(f"{key}:{mark}{given[key]}{mark}" for key, mark in marks.items())
        return template.replace("NAME", tool).replace("PAIRS", pairs)

    return write


HERMES = ToolFormat(
    as_json("<tool_call>\n@\n</tool_call>"), special="<tool_call> </tool_call> <think> </think>"
)
HY = (
    "<tool_calls> </tool_calls> <tool_sep> <tool_call> </tool_call> <arg_key> </arg_key>"
    " <arg_value> </arg_value> <think> </think>"
)
STEP = (
    "<｜tool_calls_begin｜> <｜tool_calls_end｜> <｜tool_call_begin｜> <｜tool_call_end｜>"
    " <｜tool_sep｜> <think> </think>"
)
FORMATS: dict[str, ToolFormat] = {
    "hermes": HERMES,
    "llama3_json": ToolFormat(
        as_json("@", "parameters"), between="; ", special="<|python_tag|>", after_text=False
    ),
    "qwen3_coder": ToolFormat(
        as_tags(
            "<tool_call>\n<function=NAME>\nPARAMETERS</function>\n</tool_call>",
            "<parameter=KEY>\nVALUE\n</parameter>\n",
        ),
        special=HERMES.special,
    ),
    "hy_v4": ToolFormat(
        as_tags(
            "<tool_call>NAMEPARAMETERS</tool_call>",
            "<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>",
        ),
        "<tool_calls>",
        "",
        "</tool_calls>",
        special=HY,
    ),
    "pythonic": ToolFormat(as_python, "[", ", ", "]", after_text=False),
    "gemma4": ToolFormat(
        as_pairs("<|tool_call>call:NAME{PAIRS}<tool_call|>", '<|"|>', ""),
        special='<|tool_call> <tool_call|> <|"|> <|channel> <channel|> <|tool_response>',
    ),
    "step3": ToolFormat(
        as_tags(
            '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME">PARAMETERS'
            "</steptml:invoke><｜tool_call_end｜>",
            '<steptml:parameter name="KEY">VALUE</steptml:parameter>',
        ),
        "<｜tool_calls_begin｜>",
        end="<｜tool_calls_end｜>",
        special=STEP,
    ),
}
THINK = "<think>", "</think>"
REASONING: dict[str, tuple[str, tuple[str, str]]] = {
    "deepseek_r1": ("hermes", THINK),
    "granite": ("hermes", ("Here is my thought process:", " Here is my response:")),
    "qwen3": ("qwen3_coder", THINK),
    "hy_v4": ("hy_v4", THINK),
    "gemma4": ("gemma4", ("<|channel>thought\n", "<channel|>")),
    "step3": ("step3", THINK),
}
"""A tool parser beside each reasoning parser, and what stands around reasoning."""
