"""Files of prompts, and the built-in one."""

from __future__ import annotations

import json
from pathlib import Path

BUILT_IN = Path(__file__).with_name("prompts.jsonl")
"""Prompts of many kinds."""
QUESTIONS = Path(__file__).with_name("questions.jsonl")
"""What users ask a chat."""


def held_out_beside(target: str) -> Path:
    """The file of prompts that a target was not trained on; the demo pair has one."""
    return Path(target).parent / "held_out.jsonl"


def default_prompts(target: str) -> list[str]:
    """The built-in ones, after the held-out ones that lie beside the demo pair's target."""
    held_out = held_out_beside(target)
    return [*(read_prompts(held_out) if held_out.is_file() else []), *read_prompts(BUILT_IN)]


def read_prompts(path: Path, count: int | None = None) -> list[str]:
    """The first prompts of a file, one a line: {"prompt": "..."} or plain text.

    Empty lines are passed over; without a count, all prompts are read.

    Raises:
        ValueError: there is no such file, or no prompt in it, or a line is not UTF-8, or starts
            like JSON and is none.
    """
    try:
        with path.open("rb") as file:
            lines = [(number, line.strip(b"\r\n")) for number, line in enumerate(file, 1)]
    except FileNotFoundError:
        raise ValueError(
            f"prompts file {str(path)!r} does not exist: pass another --prompts."
        ) from None
    written = [(number, line) for number, line in lines if line.strip()][:count]
    prompts = [_prompt(path, number, line) for number, line in written]
    if not prompts:
        raise ValueError(f"prompts file {str(path)!r} holds no prompts: pass another --prompts.")
    return prompts


def _prompt(path: Path, number: int, written: bytes) -> str:
    try:
        line = written.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{path}, line {number}: it is not UTF-8.") from None
    if not line.startswith("{"):
        return line
    try:
        prompt = json.loads(line)["prompt"]
    except (json.JSONDecodeError, KeyError):
        prompt = None
    if not isinstance(prompt, str):
        raise ValueError(f'{path}, line {number}: expected {{"prompt": "..."}} or plain text.')
    return prompt
