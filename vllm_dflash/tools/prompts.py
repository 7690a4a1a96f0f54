"""Reads files of prompts, and locates the built-in ones."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from pathlib import Path

BUILT_IN = Path(__file__).with_name("prompts.jsonl")
"""Prompts of many kinds."""
QUESTIONS = Path(__file__).with_name("questions.jsonl")
"""Questions that users ask a chat model."""


def held_out_beside(target: str) -> Path:
    """Return the path, next to a target, of prompts that it was not trained on.

    The demo pair has this file; for other targets it need not exist.
    """
    return Path(target).parent / "held_out.jsonl"


def default_prompts(target: str) -> list[str]:
    """Return the built-in prompts, after the held-out ones next to the target if there are any."""
    held_out = held_out_beside(target)
    return [*(read_prompts(held_out) if held_out.is_file() else []), *read_prompts(BUILT_IN)]


def read_prompts(path: Path, count: int | None = None) -> list[str]:
    """Read the first `count` prompts of a file (default: all).

    Each line is a prompt, as {"prompt": "..."} or plain text; empty lines are skipped.

    Raises:
        ValueError: the file does not exist or has no prompt, or a line is not UTF-8 or is invalid
            JSON.
    """
    try:
        text = path.read_bytes().removeprefix(BOM_UTF8)
    except FileNotFoundError:
        raise ValueError(
            f"prompts file {str(path)!r} does not exist: pass another --prompts."
        ) from None
    if _is_array(text):
        raise ValueError(
            f"prompts file {str(path)!r} is one JSON array: write each of its objects on its own"
            " line (jq --compact-output '.[]')."
        )
    lines = [(number, line.strip(b"\r")) for number, line in enumerate(text.split(b"\n"), 1)]
    written = [(number, line) for number, line in lines if line.strip()][:count]
    prompts = [_prompt(path, number, line) for number, line in written]
    if not prompts:
        raise ValueError(f"prompts file {str(path)!r} holds no prompts: pass another --prompts.")
    return prompts


def _is_array(text: bytes) -> bool:
    """Whether a file is one JSON array of objects, and no prompt that begins with a bracket."""
    try:
        found = json.loads(text) if text.lstrip().startswith(b"[") else None
    except ValueError:
        return False
    return isinstance(found, list) and any(isinstance(one, dict) for one in found)


def _prompt(path: Path, number: int, written: bytes) -> str:
    try:
        line = written.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{path}, line {number}: it is not UTF-8.") from None
    if not line.lstrip().startswith("{"):
        return line
    try:
        prompt = json.loads(line)["prompt"]
    except (json.JSONDecodeError, KeyError):
        prompt = None
    if not isinstance(prompt, str):
        raise ValueError(f'{path}, line {number}: expected {{"prompt": "..."}} or plain text.')
    return prompt
