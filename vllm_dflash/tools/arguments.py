"""Types of arguments that several commands take."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AllowInfNan, Field, NonNegativeFloat, PositiveInt, TypeAdapter


def _number(kind: Any, words: str) -> Callable[[str], Any]:
    """The type of an argument that is a number of such a kind, as pydantic reads it."""
    adapter = TypeAdapter[Any](kind)

    def parse(text: str) -> Any:
        try:
            return adapter.validate_strings(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text} is not a {words}") from None

    return parse


positive = _number(PositiveInt, "positive whole number")
whole = _number(Annotated[int, Field(ge=0)], "whole number of 0 or more")
duration = _number(Annotated[float, Field(gt=0, allow_inf_nan=False)], "positive number of seconds")
not_negative = _number(Annotated[NonNegativeFloat, AllowInfNan(False)], "number of 0 or more")
"""Finite: as a limit, anything else would let everything or nothing pass."""
share = _number(Annotated[float, Field(gt=0, le=1)], "number above 0 and up to 1")


def json_object(text: str) -> dict[str, Any]:
    """An object in JSON."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text} is not a JSON object")
    return value


def add_number(options: argparse._ActionsContainer, name: str, default: int, about: str) -> None:
    """An option that takes a positive whole number."""
    about = f"{about} (default: {default})"
    options.add_argument(name, type=positive, default=default, metavar="N", help=about)


def add_numbers(
    options: argparse._ActionsContainer,
    name: str,
    default: Sequence[int],
    about: str,
    nargs: str = "*",
) -> None:
    """An option that takes several positive whole numbers; with `nargs="+"`, one at least."""
    about = f"{about} (default: {' '.join(map(str, default)) or 'none'})"
    options.add_argument(name, type=positive, nargs=nargs, default=default, metavar="N", help=about)


def add_folder(options: argparse._ActionsContainer, name: str, default: str, about: str) -> None:
    """An option that takes a folder."""
    about = f"{about} (default: {default})"
    options.add_argument(name, type=Path, default=Path(default), metavar="FOLDER", help=about)


def add_models(options: argparse._ActionsContainer) -> None:
    """Options for a pair of the user's, where it is not the demo pair."""
    options.add_argument("--target", help="folder or repository of the target; needs --drafter")
    options.add_argument("--drafter", help="folder or repository of the drafter")


def add_prompts(
    options: argparse._ActionsContainer, default: str, nargs: str | None = None
) -> None:
    """A file of prompts, or `nargs` of them; `default` says in words which are taken without."""
    about = f'lines of {{"prompt": "..."}} or of plain text (default: {default})'
    options.add_argument("--prompts", type=Path, nargs=nargs, metavar="FILE", help=about)


def add_pair(parser: argparse.ArgumentParser) -> None:
    """The drafter and its target, and options that say how the drafter is read."""
    parser.add_argument("drafter", help="folder or repository of the drafter")
    parser.add_argument("--target", required=True, help="folder or repository of the target")
    parser.add_argument("--revision", help="revision of the drafter's repository")
    parser.add_argument(
        "--drafter-overrides",
        type=json_object,
        metavar="JSON",
        help="fields to use instead of those in the drafter's config.json",
    )
