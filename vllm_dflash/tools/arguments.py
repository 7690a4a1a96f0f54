"""Types of arguments that several commands take."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def positive(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no positive whole number")
    return int(text)


def not_negative(text: str) -> float:
    """A finite number from 0 on: as a limit, anything else would let everything or nothing pass."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number from 0 on")
    return number


def share(text: str) -> float:
    """A number above 0, up to 1."""
    number = not_negative(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no number above 0 and up to 1")
    return number


def json_object(text: str) -> dict[str, Any]:
    """An object in JSON."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text} is no JSON object")
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


def add_compared(options: argparse._ActionsContainer, of_prompts: str) -> None:
    """What is compared where it is not the demo pair: a pair of the user's, and prompts."""
    options.add_argument("--target", help="folder or repository of the target; needs --drafter")
    options.add_argument("--drafter", help="folder or repository of the drafter")
    about = f'lines of {{"prompt": "..."}} or of plain text (default: {of_prompts})'
    options.add_argument("--prompts", type=Path, metavar="FILE", help=about)


def add_pair(parser: argparse.ArgumentParser) -> None:
    """The drafter and its target, and options that say how the drafter is read."""
    parser.add_argument("drafter", help="folder or repository of the drafter")
    parser.add_argument("--target", required=True, help="folder or repository of the target")
    parser.add_argument("--revision", help="of the drafter's repository")
    parser.add_argument(
        "--drafter-overrides",
        type=json_object,
        metavar="JSON",
        help="fields that stand in for those of the drafter's config.json",
    )
