"""Words of a refusal: values, errors of others, and names that were meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_dflash.checkpoint.refusal import (
    looks_local,
    missing_model_reason,
    nearest,
    one_line,
    shown,
)


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
