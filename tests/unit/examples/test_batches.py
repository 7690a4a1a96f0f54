"""What a batch run writes, and how it counts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ray_engines import batch_run
from ray_engines.batch_parts import (
    ABOUT,
    FORMATS,
    check_claimed,
    claim,
    finished_ids,
    read_parts,
    write_part,
)


@pytest.mark.parametrize("form", FORMATS)
def test_parts_are_whole_or_absent(tmp_path: Path, form: str) -> None:
    rows = [{"id": number, "text": "ä\n", "error": None} for number in range(12)]
    for begin in (8, 0, 4):
        write_part(tmp_path, rows[begin : begin + 4], form)
    write_part(tmp_path, rows[4:8], form)  # done twice
    assert sorted(read_parts(tmp_path), key=lambda row: row["id"]) == rows
    assert finished_ids(tmp_path) == {str(number) for number in range(12)}
    (tmp_path / f"part-1.{form}.unfinished").write_text('{"id": 99')
    assert len(finished_ids(tmp_path)) == 12
    claim(tmp_path, {"model": "a"})
    assert not list(tmp_path.glob("*.unfinished"))


def test_a_folder_holds_parts_of_one_run(tmp_path: Path) -> None:
    claim(tmp_path, {"model": "a", "max_tokens": 4})  # no part is written yet
    claim(tmp_path, {"model": "a", "max_tokens": 5})
    write_part(tmp_path, [{"id": 0}], "jsonl")
    claim(tmp_path, {"model": "a", "max_tokens": 5})
    with pytest.raises(ValueError, match=r"max_tokens was 5 and is 6.*another --out"):
        claim(tmp_path, {"model": "a", "max_tokens": 6})
    assert json.loads((tmp_path / ABOUT).read_text())["max_tokens"] == 5
    check_claimed(tmp_path)
    with pytest.raises(ValueError, match=r"elsewhere on .* storage shared by all nodes"):
        check_claimed(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("id_column", "limit", "is_ordered"),
    [(None, None, True), (None, 5, True), ("name", 5, True), ("name", None, False)],
)
def test_rows_keep_their_order_where_numbers_or_a_limit_depend_on_it(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    id_column: str | None,
    limit: int | None,
    is_ordered: bool,
) -> None:
    """Otherwise a resumed run would give answers the ids of other prompts."""
    options = SimpleNamespace(preserve_order=None)
    context = SimpleNamespace(execution_options=options)
    monkeypatch.setattr("ray.data.DataContext.get_current", lambda: context)
    monkeypatch.setattr(batch_run, "read", lambda _: SimpleNamespace(count=lambda: 0))
    monkeypatch.setattr(batch_run, "count_ids", lambda *_: 0)
    settings: Any = SimpleNamespace(out=tmp_path / "out", about=dict)
    settings.id_column, settings.limit = id_column, limit
    assert batch_run.run(settings, lambda _: None).total == 0
    assert options.preserve_order is is_ordered


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        (None, "there is no prompt"),
        (float("nan"), "there is no prompt"),
        (7, "the prompt is not text: 7"),
        ("", "0 tokens; from 1 to 3 fit max_model_len 4"),
        ("abc", None),
        ("abcd", "4 tokens; from 1 to 3 fit max_model_len 4"),
    ],
)
def test_a_row_has_an_error_where_nothing_can_follow(prompt: Any, error: str | None) -> None:
    """A prompt of `max_model_len` tokens leaves no room."""
    generator: Any = batch_run.Generator.__new__(batch_run.Generator)
    generator._settings = SimpleNamespace(max_model_len=4)
    generator._llm = SimpleNamespace(get_tokenizer=lambda: SimpleNamespace(encode=list))
    assert generator._error_of(prompt) == error
