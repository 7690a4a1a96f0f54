"""How models write tool calls, by the name of vLLM's parser; written by hand."""

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
    special: str
    """Texts that are one token each, separated by spaces."""
    begin: str = ""
    between: str = "\n"
    end: str = ""

    def of(self, *calls: Call) -> str:
        """An answer that makes these calls."""
        return self.begin + self.between.join(self.write(*call) for call in calls) + self.end


def as_json(tool: str, given: Arguments) -> str:
    """Write a call as one JSON object."""
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': given})}\n</tool_call>"


def as_tags(call: str, parameter: str) -> Writer:
    """Writer of a call from templates with NAME, PARAMETERS, KEY and VALUE."""

    def write(tool: str, given: Arguments) -> str:
        parts = [
            parameter.replace("KEY", key).replace("VALUE", str(value))
            for key, value in given.items()
        ]
        return call.replace("NAME", tool).replace("PARAMETERS", "".join(parts))

    return write


FORMATS: dict[str, ToolFormat] = {
    "hermes": ToolFormat(as_json, "<tool_call> </tool_call>"),
    "hy_v4": ToolFormat(
        as_tags(
            "<tool_call>NAMEPARAMETERS</tool_call>",
            "<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>",
        ),
        "<tool_calls> </tool_calls> <tool_sep> <tool_call> </tool_call> <arg_key> </arg_key>"
        " <arg_value> </arg_value> <think> </think>",
        begin="<tool_calls>",
        between="",
        end="</tool_calls>",
    ),
    "step3": ToolFormat(
        as_tags(
            '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME">PARAMETERS'
            "</steptml:invoke><｜tool_call_end｜>",
            '<steptml:parameter name="KEY">VALUE</steptml:parameter>',
        ),
        "<｜tool_calls_begin｜> <｜tool_calls_end｜> <｜tool_call_begin｜> <｜tool_call_end｜>"
        " <｜tool_sep｜>",
        begin="<｜tool_calls_begin｜>",
        end="<｜tool_calls_end｜>",
    ),
}
