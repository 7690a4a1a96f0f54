"""From what pydantic finds wrong to one message for whoever wrote it."""

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
"""Larger numbers than this are mistakes, and would only show as a lack of memory."""


def whole(
    default: Any = ..., *, least: int = 1, most: int = LARGEST, alias: str | None = None
) -> Any:
    """A field that is a whole number within reason. A default may be a function of the others."""
    wanted = f"an integer from {least} to {most}"
    return described(default, wanted, ge=least, le=most, alias=alias)


def positive(default: Any = ..., *, alias: str | None = None) -> Any:
    """A field that is a positive number, neither infinite nor NaN, which JSON may hold."""
    return described(default, "a positive number", gt=0, lt=LARGEST, alias=alias)


def flag(default: Any, *, alias: str | None = None) -> Any:
    """A field that is true or false."""
    return described(default, "true or false", alias=alias)


def described(default: Any, description: str, **bounds: Any) -> Any:
    """A field, what it must be in words that follow "must be", and more of pydantic's `Field`."""
    source = "default_factory" if callable(default) else "default"
    return Field(description=description, **{source: default}, **bounds)


def checked(
    kind: type[Fields],
    written: Mapping[str, Any],
    *,
    inside: str = "",
    said: str = "config.json says {}",
) -> Fields:
    """The fields of `kind` among those that are `written`, by alias; null counts as missing.

    A field that is not what its description asks for is refused by its name, with its value; all
    of them in one message.

    Args:
        kind: a pydantic model whose fields have descriptions ("an integer from 2 to 1024").
        written: by name.
        inside: the object of which these are fields, if it has a name.
        said: how the message gives a value.

    Raises:
        ValueError: with a message without its full stop.
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
            if not found["loc"]:  # of several fields, and a sentence already
                faults[str(cause)] = None
                continue
            name = str(found["loc"][0])
            wanted = cause or fields[name].description
            value = said.format(shown(there.get(name)))
            faults[f"{name}{f' of {inside}' if inside else ''} must be {wanted}, {value}"] = None
        raise ValueError("; ".join(faults)) from None  # whose message says as much, and no more


def shown(value: Any) -> str:
    """A value in a message, however large it is."""
    written = repr(value)
    return written if len(written) <= 300 else f"{written[:300]}... ({len(written)} characters)"


def without_frame(error: Exception) -> str:
    """An error's message in one line, without pydantic's frame around it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and "validation error" in lines[0]:
        lines = lines[1:]
    return " ".join(lines).split(" [type=")[0]


def folder_fault(model: str) -> str | None:
    """Why no model lies where `model` points; None where one does, or a repository may.

    The words follow the name of it and a colon.
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
    folder = Path(os.path.expanduser(folder))  # as a shell does, but not inside of JSON
    there = [one.name for one in folder.parent.glob("*/") if (one / "config.json").is_file()]
    near = nearest(folder.name, there)
    hint = f" (did you mean {str(folder.parent / near)!r}?)" if near else ""
    if not near and folder.parent == Path("models/demo"):
        hint = " (the demo pair's? `vllm-dflash demo --unpack` copies it there)"
    if is_local:
        return f"this folder does not exist{hint}"
    return f"no such folder, and not a repository name, which has one slash at most{hint}"


def looks_local(model: str) -> bool:
    """Whether this is a folder and no repository."""
    return model.startswith((".", "/", "~")) or Path(model).exists()


def nearest(name: str, known: Collection[str]) -> str | None:
    """The known name that an unknown one may have been meant to be."""
    near = difflib.get_close_matches(name, known, n=1)
    return near[0] if near else None
