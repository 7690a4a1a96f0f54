"""Loads whose answers repeat what they were asked, and one that does not, from any machine's text.

The text is Python's own: the source of its library, and the language reference that `help()` shows.
"""

from __future__ import annotations

import inspect
import json.decoder
import shlex
import string
import tempfile
import textwrap
from pydoc_data import topics

MODULES = (textwrap, shlex, string, json.decoder, tempfile)
CODE_CHARACTERS, PASSAGE_CHARACTERS, BEGINNING_CHARACTERS = 1400, 1100, 80
"""With a beginning of the answer, about 600 tokens of a small vocabulary."""


def edits() -> list[str]:
    """Pieces of source code to write out again with a small change, the first lines of which are
    there."""
    return [
        f"{piece}\n# The same again, with one name changed:\n\n{_beginning(piece)}"
        for module in MODULES
        for piece in _pieces(inspect.getsource(module), CODE_CHARACTERS)
    ]


def quotes() -> list[str]:
    """Passages to answer a question from in their own words, with the first words."""
    return [
        f"{passage}\n\nWhat does the text say? It says:\n\n{_beginning(passage)}"
        for passage in _passages()
    ]


def prose() -> list[str]:
    """Passages to go on from."""
    return [passage[: PASSAGE_CHARACTERS // 2] for passage in _passages()]


def _beginning(text: str) -> str:
    """Its first lines."""
    end = text.find("\n", BEGINNING_CHARACTERS)
    return text[: end + 1]


def _pieces(text: str, characters: int) -> list[str]:
    """Text cut at ends of lines, without what is left over."""
    pieces, piece = [], ""
    for line in text.splitlines(keepends=True):
        piece += line
        if len(piece) >= characters:
            pieces.append(piece)
            piece = ""
    return pieces


def _passages() -> list[str]:
    """The beginnings of all long topics of the language reference."""
    texts = (text for _, text in sorted(topics.topics.items()))
    return [text[:PASSAGE_CHARACTERS] for text in texts if len(text) > 2 * PASSAGE_CHARACTERS]
