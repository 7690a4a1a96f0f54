"""Prompts of loads: hard to draft for, very long, or repetitive.

The loads `edit`, `quote` and `prose` have their own prompts, from text that every machine has: the
source of Python's library, and the language reference that `help()` shows.
"""

from __future__ import annotations

import inspect
import json.decoder
import random
import shlex
import string
import tempfile
import textwrap
from collections.abc import Callable, Sequence

MODULES = (textwrap, shlex, string, json.decoder, tempfile)
CODE_CHARACTERS, PASSAGE_CHARACTERS, BEGINNING_CHARACTERS = 1400, 1100, 80
"""Together with the beginning of the answer, about 600 tokens of a small vocabulary."""


def easy_and_hard(prompts: Sequence[str]) -> list[str]:
    """Shuffle the words of every other prompt, so that no drafter can predict its text."""
    mixed = list(prompts)
    for number in range(1, len(mixed), 2):
        words = mixed[number].split()
        random.Random(mixed[number]).shuffle(words)
        mixed[number] = " ".join(words)
    return mixed


def long_texts(prompts: Sequence[str], count: int) -> list[str]:
    """Return `count` texts, each with all prompts, beginning with a different prompt each time."""
    starts = (len(prompts) * number // count for number in range(count))
    return ["\n".join([*prompts[start:], *prompts[:start]]) for start in starts]


def turns_of_agents(count: int, turns: int, seed: str) -> list[list[str]]:
    """Return the prompts of `count` conversations, turn by turn, each of which repeats a file.

    A turn's prompt has all earlier turns with their answers, as an agent sends it. Conversations
    with another seed share no prefix.
    """
    pieces = _code()
    prompts = []
    earlier = [f"# Conversation {number}, {seed}\n\n" for number in range(count)]
    for turn in range(turns):
        chosen = [pieces[(number * turns + turn) % len(pieces)] for number in range(count)]
        asked = [text + _to_repeat(piece) for text, piece in zip(earlier, chosen, strict=True)]
        prompts.append([a + _beginning(piece) for a, piece in zip(asked, chosen, strict=True)])
        earlier = [f"{a}{piece}\n" for a, piece in zip(asked, chosen, strict=True)]
    return prompts


def _edits() -> list[str]:
    """Pieces of source code to repeat with a small change, and the first lines of the answer."""
    return [_to_repeat(piece) + _beginning(piece) for piece in _code()]


def _to_repeat(piece: str) -> str:
    return f"{piece}\n# The same again, with one name changed:\n\n"


def _code() -> list[str]:
    """Pieces of source code."""
    pieces, piece = [], ""
    for module in MODULES:
        for line in inspect.getsource(module).splitlines(keepends=True):
            piece += line
            if len(piece) >= CODE_CHARACTERS:
                pieces.append(piece)
                piece = ""
        piece = ""  # drop the rest of a module
    return pieces


def _quotes() -> list[str]:
    """Passages with a question to answer by quoting them, and the first words of the answer."""
    return [
        f"{passage}\n\nWhat does the text say? It says:\n\n{_beginning(passage)}"
        for passage in _passages()
    ]


def _prose() -> list[str]:
    """Passages to continue."""
    return [passage[: PASSAGE_CHARACTERS // 2] for passage in _passages()]


def _beginning(text: str) -> str:
    """Return the first lines of a text, at least 80 characters."""
    return text[: text.find("\n", BEGINNING_CHARACTERS) + 1]


def _passages() -> list[str]:
    """Return the beginnings of all long topics of the language reference."""
    from pydoc_data.topics import topics  # large

    texts = (text for _, text in sorted(topics.items()))
    return [text[:PASSAGE_CHARACTERS] for text in texts if len(text) > 2 * PASSAGE_CHARACTERS]


TEXTS: dict[str, Callable[[], list[str]]] = {"edit": _edits, "quote": _quotes, "prose": _prose}
"""Loads that have their own prompts."""
