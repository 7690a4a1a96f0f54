"""Fields with descriptions, and one readable message for everything pydantic finds wrong."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, Field, ValidationError

Fields = TypeVar("Fields", bound=BaseModel)
LARGEST = 1 << 31
"""Limit of numbers; larger ones are mistakes that would only show as a lack of memory."""


def integer(
    default: Any = ..., *, least: int = 1, most: int = LARGEST, alias: str | None = None
) -> Any:
    """A field that is an integer from `least` to `most`. `default` may be a function of others."""
    wanted = f"an integer from {least} to {most}"
    return described(default, wanted, ge=least, le=most, alias=alias)


def positive(default: Any = ..., *, alias: str | None = None) -> Any:
    """A field that is a positive number, and not infinite or NaN, which JSON allows."""
    return described(default, "a positive number", gt=0, lt=LARGEST, alias=alias)


def flag(default: Any, *, alias: str | None = None) -> Any:
    """A field that is true or false."""
    return described(default, "true or false", alias=alias)


def described(default: Any, description: str, **bounds: Any) -> Any:
    """A pydantic field. `description` follows "must be" in messages; `bounds` go to `Field`."""
    source = "default_factory" if callable(default) else "default"
    return Field(description=description, **{source: default}, **bounds)


def checked(
    kind: type[Fields],
    written: Mapping[str, Any],
    *,
    inside: str = "",
    said: str = "config.json says {}",
) -> Fields:
    """Validate the fields of `kind` in `written`, by alias; null counts as missing.

    One message names every field that is not what its description says, with its value.

    Args:
        kind: a pydantic model whose fields have descriptions ("an integer from 2 to 1024").
        written: values by name.
        inside: name of the object that contains these fields, if it has one.
        said: format of a value in the message.

    Raises:
        ValueError: the message has no full stop.
    """
    there = {name: value for name, value in written.items() if value is not None}
    try:
        return kind.model_validate(there, by_alias=True, by_name=False)
    except ValidationError as error:
        fields = {field.alias or name: field for name, field in kind.model_fields.items()}
        faults: dict[str, None] = {}
        for found in error.errors():
            if found["type"] == "default_factory_not_called":  # a field it depends on is at fault
                continue
            cause = found.get("ctx", {}).get("error")
            if not found["loc"]:  # about several fields: already a sentence
                faults[str(cause)] = None
                continue
            name = str(found["loc"][0])
            wanted = cause or fields[name].description
            value = said.format(shown(there.get(name)))
            faults[f"{name}{f' of {inside}' if inside else ''} must be {wanted}, {value}"] = None
        raise ValueError("; ".join(faults)) from None


def shown(value: Any) -> str:
    """A value for a message, cut off if it is long."""
    return cut_off(repr(value))


def cut_off(text: str, most: int = 300) -> str:
    """The text, or the first `most` characters of a longer one and its length."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def one_line(error: Exception) -> str:
    """An error's message in one line, without pydantic's header and details."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and "validation error" in lines[0]:
        lines = lines[1:]
    return " ".join(lines).split(" [type=")[0]


def missing_model_reason(model: str) -> str | None:
    """Reason why there is no model at `model`; None if there is one, or if it may be a repository.

    The text is meant to follow the model's name and a colon.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    folder, is_local = Path(model), looks_local(model)
    if (folder / "config.json").is_file():
        return None
    if folder.exists():
        return "this folder has no config.json" if folder.is_dir() else "this is not a folder"
    if not is_local:
        with suppress(HFValidationError):
            validate_repo_id(model)
            return None
    folder = Path(os.path.expanduser(folder))  # a shell does not expand ~ inside JSON
    there = [one.name for one in folder.parent.glob("*/") if (one / "config.json").is_file()]
    near = nearest(folder.name, there)
    hint = f" (did you mean {str(folder.parent / near)!r}?)" if near else ""
    if not near and folder.parent == Path("models/demo"):
        hint = " (for the demo pair, run `vllm-dflash demo --unpack`, which copies it there)"
    if is_local:
        return f"this folder does not exist{hint}"
    return f"no such folder, and not a repository name, which has at most one slash{hint}"


def looks_local(model: str) -> bool:
    """Whether this is a folder rather than a repository."""
    return model.startswith((".", "/", "~")) or Path(model).exists()


def nearest(name: str, known: Collection[str]) -> str | None:
    """The known name closest to `name`; None if none is similar."""
    near = difflib.get_close_matches(name, known, n=1)
    return near[0] if near else None
