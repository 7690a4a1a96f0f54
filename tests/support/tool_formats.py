"""How models write tool calls: what the formats of `tool_dialects.py` are made of."""

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
    reasoning: str | None = None
    """The reasoning parser of the same models."""
    after_text: bool = True
    """Whether calls may follow text."""
    several: bool = True
    """Whether one answer may have more than one call."""

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
    """Writer of a call from templates with NAME, PARAMETERS, KEY, VALUE, STRING and TYPE."""

    def write(tool: str, given: Arguments) -> str:
        parts = [
            parameter.replace("KEY", key)
            .replace("STRING", "true" if isinstance(value, str) else "false")
            .replace("TYPE", "string" if isinstance(value, str) else "integer")
            .replace("VALUE", _value(value))
            for key, value in given.items()
        ]
        return call.replace("NAME", tool).replace("PARAMETERS", "".join(parts))

    return write


def as_text(template: str) -> Writer:
    """Writer of a call from a template with NAME and JSON."""
    return lambda tool, given: template.replace("NAME", tool).replace(
        "JSON", json.dumps(given, ensure_ascii=False)
    )


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
