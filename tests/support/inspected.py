"""Inspections that are checked against the schema of their JSON."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from vllm_dflash.tools.inspect import inspection as result
from vllm_dflash.tools.inspect.inspect_pair import inspect_pair
from vllm_dflash.tools.inspect.inspection import Inspection

SMALL = {"dtype": "float32", "max_model_len": 256}


def conforms(value: Any, kind: Any) -> bool:
    """Whether a value of a JSON object is what the result's annotation says."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return any(conforms(value, one) for one in arguments)
    if kind is Any:
        return True
    if origin in (list, tuple):
        return isinstance(value, list) and all(conforms(one, arguments[0]) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(conforms(v, arguments[1]) for v in value.values())
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        if not isinstance(value, dict):
            return False
        return bool(kind.model_validate_json(json.dumps(value)).model_dump(mode="json") == value)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return (
            isinstance(value, dict)
            and value.keys() == hints.keys()
            and all(conforms(value[name], hint) for name, hint in hints.items())
        )
    return type(value) is kind


def check_schema(found: dict[str, Any]) -> None:
    """The object of `--json`, which has the same keys whatever was found."""
    found = dict(found)
    assert found.pop("schema") == result.SCHEMA
    assert found.pop("status") == result.STATUS[found.pop("exit_code")]
    hints = typing.get_type_hints(Inspection)
    assert found.keys() == hints.keys()
    assert [name for name, hint in hints.items() if not conforms(found[name], hint)] == []


def inspect(
    drafter: Path | str, target: Path | str, engine: Mapping[str, Any] = SMALL, **changes: Any
) -> Inspection:
    found = inspect_pair(str(drafter), str(target), **engine, **changes)
    check_schema(json.loads(json.dumps(found.to_dict())))
    assert (found.command is None) == (found.exit_code != result.FITS)
    return found
