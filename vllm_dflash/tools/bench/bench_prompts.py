"""Prompts of a benchmark, easy and hard to draft for."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path


def read_prompts(path: Path, count: int | None = None) -> list[str]:
    """The first prompts of a file, one a line: {"prompt": "..."} or plain text.

    Empty lines are passed over; without a count, all prompts are read.

    Raises:
        ValueError: a line starts like JSON and is no such prompt.
    """
    with path.open(encoding="utf-8") as file:
        lines = [(number, line.strip("\n")) for number, line in enumerate(file, 1)]
    return [_prompt(path, number, line) for number, line in lines if line.strip()][:count]


def _prompt(path: Path, number: int, line: str) -> str:
    if not line.startswith("{"):
        return line
    try:
        prompt = json.loads(line)["prompt"]
    except (json.JSONDecodeError, KeyError):
        prompt = None
    if not isinstance(prompt, str):
        raise ValueError(f'{path}, line {number}: expected {{"prompt": "..."}} or plain text.')
    return prompt


def in_order_of_round(prompts: Sequence[str], round_number: int) -> list[str]:
    """The prompts in an order that is this round's own."""
    order = list(prompts)
    random.Random(f"order {round_number}").shuffle(order)
    return order


def easy_and_hard(prompts: Sequence[str]) -> list[str]:
    """Every other prompt with its words shuffled: text that no drafter can foresee."""
    return [
        prompt if number % 2 == 0 else _words_shuffled(prompt)
        for number, prompt in enumerate(prompts)
    ]


def _words_shuffled(prompt: str) -> str:
    words = prompt.split()
    random.Random(prompt).shuffle(words)
    return " ".join(words)
