"""Pydantic's errors become one message that names each field and its value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from vllm_dflash.checkpoint.refusal import (
    checked,
    described,
    flag,
    integer,
    looks_local,
    missing_model_reason,
    nearest,
    one_line,
    positive,
    shown,
)


def fields() -> type[BaseModel]:
    class Written(BaseModel):
        model_config = ConfigDict(strict=True)

        size: int = integer(least=2, most=9)
        half: int = integer(lambda read: read["size"] // 2)
        eps: float = positive(0.5)
        on: bool = flag(False)
        name: str = described("x", "a short name", max_length=3)

        @field_validator("name")
        @classmethod
        def _is_lower(cls, name: str) -> str:
            if not name.islower():
                raise ValueError("in small letters")
            return name

        @model_validator(mode="after")
        def _agree(self) -> Written:
            if self.on and self.half == 1:
                raise ValueError("on and half do not agree")
            return self

    return Written


def read(written: dict[str, Any], **how: str) -> dict[str, Any] | str:
    """Return the fields, or the message of the refusal."""
    try:
        return checked(fields(), written, **how).model_dump()
    except ValueError as refused:
        return str(refused)


LEAST = {"size": 4, "half": 2, "eps": 0.5, "on": False, "name": "x"}
SIZE = "size must be an integer from 2 to 9, config.json says"
EPS = "eps must be a positive number, config.json says"


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"size": 4, "eps": None, "else": 3}, LEAST),
        (
            {"size": 9, "half": 1 << 31, "on": True},
            {**LEAST, "size": 9, "half": 1 << 31, "on": True},
        ),
        ({}, f"{SIZE} None"),
        ({"size": 10}, f"{SIZE} 10"),
        ({"size": True}, f"{SIZE} True"),
        ({"size": 4, "eps": 1 << 31}, f"{EPS} 2147483648"),
        ({"size": 4, "eps": float("nan")}, f"{EPS} nan"),
        ({"size": 4, "on": 1}, "on must be true or false, config.json says 1"),
        ({"size": 4, "name": "A"}, "name must be in small letters, config.json says 'A'"),
        # `half` depends on `size` and is not blamed; later fields are.
        ({"size": "s", "eps": -1}, f"{SIZE} 's'; {EPS} -1"),
        # A fault of two fields is a sentence.
        ({"size": 2, "on": True}, "on and half do not agree"),
    ],
)
def test_fields_and_faults(written: dict[str, Any], expected: dict[str, Any] | str) -> None:
    assert read(written) == expected


def test_inside_and_said() -> None:
    message = read({"size": 1}, inside="rope", said="not {}")
    assert message == "size of rope must be an integer from 2 to 9, not 1"


def test_a_long_value_is_shown_in_part() -> None:
    assert shown("x" * 298) == f"'{'x' * 298}'"
    assert shown("x" * 299) == f"'{'x' * 299}... (301 characters)"


@pytest.mark.parametrize(
    ("message", "bare"),
    [
        ("", ""),
        ("one\n\n  two \n", "one two"),
        ("1 validation error for X\n  no good [type=value_error, input=3]\n  see", "no good"),
        ("2 validation errors for X\nsize\n  too large", "size too large"),
        ("bad [type=a] [type=b]", "bad"),
    ],
)
def test_one_line_leaves_out_pydantics_header(message: str, bare: str) -> None:
    assert one_line(ValueError(message)) == bare


def test_what_is_wrong_with_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "config.json").write_text("{}")
    (tmp_path / "odd" / "config.json").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, fault in {
        "whole": None,
        "empty": "this folder has no config.json",
        "odd": "this folder has no config.json",
        "./none": "this folder does not exist",
        "~nobody/none": "this folder does not exist",
        "~/whole": f"this folder does not exist (did you mean '{tmp_path}/whole'?)",
        str(tmp_path / "none"): "this folder does not exist",
        str(tmp_path / "whole"): None,
        "z-lab/Qwen3-8B-DFlash-b16": None,  # a repository
    }.items():
        assert missing_model_reason(name) == fault, name
        assert looks_local(name) == (not name.startswith("z-lab")), name


def test_the_nearest_name() -> None:
    known = ["block_size", "mask_token_id", "block_siz"]
    assert nearest("block_sizes", known) == "block_size"
    assert nearest("mask_token", known) == "mask_token_id"
    assert nearest("zzz", known) is None
