"""Inspections that are checked against the schema of their JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from vllm_dflash.tools.inspect.inspect_pair import inspect_pair
from vllm_dflash.tools.inspect.inspection import FITS, Inspection

SMALL = {"dtype": "float32", "max_model_len": 256}


def check_schema(found: dict[str, Any]) -> None:
    """Check the object of `--json`, which has the same keys whatever was found."""
    read = TypeAdapter(Inspection).validate_json(json.dumps(found), strict=True)
    assert json.loads(json.dumps(read.to_dict())) == found


def inspect(
    drafter: Path | str, target: Path | str, engine: Mapping[str, Any] = SMALL, **changes: Any
) -> Inspection:
    found = inspect_pair(str(drafter), str(target), **engine, **changes)
    check_schema(json.loads(json.dumps(found.to_dict())))
    assert (found.command is None) == (found.exit_code != FITS)
    return found
