"""Types and options of arguments that several commands share."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import AllowInfNan, Field, NonNegativeFloat, PositiveInt, TypeAdapter


def _number(kind: Any, words: str) -> Callable[[str], Any]:
    """Return an argparse type for numbers that pydantic accepts as `kind`; errors name `words`."""
    adapter = TypeAdapter[Any](kind)

    def parse(text: str) -> Any:
        try:
            return adapter.validate_strings(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text} is not a {words}") from None

    return parse


positive = _number(PositiveInt, "positive whole number")
whole = _number(Annotated[int, Field(ge=0)], "non-negative whole number")
not_negative = _number(Annotated[NonNegativeFloat, AllowInfNan(False)], "non-negative number")
"""Finite, since infinity or NaN as a limit would let everything or nothing pass."""
share = _number(Annotated[float, Field(gt=0, le=1)], "number above 0 and at most 1")


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text} is not a JSON object")
    return value


NUMBER: dict[str, Any] = {"type": positive, "metavar": "N"}
NUMBERS: dict[str, Any] = {**NUMBER, "nargs": "+"}
"""Arguments for argparse."""


def add_models(options: argparse._ActionsContainer) -> None:
    """Add options for a pair to use instead of the demo pair."""
    about = "path or Hugging Face name of the target (requires --drafter)"
    options.add_argument("--target", help=about)
    about = "path or Hugging Face name of the drafter (requires --target)"
    options.add_argument("--drafter", help=about)


def add_prompts(
    options: argparse._ActionsContainer, default: str, nargs: str | None = None
) -> None:
    """Add `--prompts` for one file or `nargs` files; `default` describes the default in words."""
    about = f'file with one prompt per line: {{"prompt": "..."}} or plain text (default: {default})'
    options.add_argument("--prompts", type=Path, nargs=nargs, metavar="FILE", help=about)


def add_pair(parser: argparse.ArgumentParser) -> None:
    """Add the drafter, its target, and options for reading the drafter."""
    parser.add_argument("drafter", help="path or Hugging Face name of the drafter")
    about = "path or Hugging Face name of the target"
    parser.add_argument("--target", required=True, help=about)
    parser.add_argument("--revision", help="revision of the drafter's repository")
    about = "fields that override those of the drafter's config.json"
    parser.add_argument("--drafter-overrides", type=json_object, metavar="JSON", help=about)


def add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    **texts: Any,
) -> argparse.ArgumentParser:
    """Add a sub-command. `texts`, such as `help` and `epilog`, keep their lines."""
    shape = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser(name, formatter_class=shape, **texts)
    parser.set_defaults(run=run)
    return parser
