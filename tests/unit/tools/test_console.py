"""Tables and progress: on a terminal, in a pipe, as Markdown."""

from __future__ import annotations

import re
import sys
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from support.fake_time import FakeTime
from vllm_dflash.tools import progress
from vllm_dflash.tools.console import print_report
from vllm_dflash.tools.inspect.inspection import Inspection, TargetFacts, make_tables
from vllm_dflash.tools.progress import Progress
from vllm_dflash.tools.tables import Table

NUMBERS = Table("a title longer than the table", ["a", "b"], [["1", "2"]])
NAMES = Table("t", ["name", "n"], [["[red]a", "1"], ["b", "22"]], words=(0,), marked=(1,))


def test_markdown() -> None:
    rows = "| a | b |\n| ---: | ---: |\n| 1 | 2 |\n"
    assert NUMBERS.markdown() == f"## a title longer than the table\n\n{rows}"
    assert "| name | n |\n| --- | ---: |\n" in NAMES.markdown()


def test_columns_line_up_and_names_are_no_markup() -> None:
    assert NAMES.plain() == "t\n  name     n\n  [red]a   1\n  b       22"
    no_heads = Table("t", (), [("a", "1"), ("bc", "2")], words=(0, 1))
    assert no_heads.plain() == "t\n  a   1\n  bc  2"


def drawn(table: Table, **terminal: Any) -> str:
    file = StringIO()
    Console(width=60, file=file, **terminal).print(table.rich())
    return file.getvalue()


def test_terminal() -> None:
    lines = drawn(NUMBERS).splitlines()
    assert lines[1] == "a title longer than the table"
    assert "│ 1 │ 2 │" in lines


def test_a_marked_row_stands_out() -> None:
    seen = drawn(NAMES, force_terminal=True)
    red = [line for line in seen.splitlines() if "\x1b[1;31m" in line]
    assert len(red) == 1
    assert "22" in red[0]
    assert "[red]a" in seen


def test_tables_where_a_person_looks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = TargetFacts("[red]t[/red]", "A", 1, 2, 3, "bfloat16", 4, None, None)
    found = Inspection("d", "t", target=target)
    print_report(make_tables(found))
    piped = capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_report(make_tables(found))
    seen = capsys.readouterr().out
    assert "│" not in piped
    assert "│" in seen
    assert "[red]t[/red]" in seen


def test_a_pipe_gets_no_escape_codes_whatever_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    print_report([NUMBERS, NAMES], ["[bold]note", "x" * 200])
    printed = capsys.readouterr().out
    assert not re.search("[\x1b┃│]", printed)
    assert printed.splitlines()[-2:] == ["[bold]note", "x" * 200]


def test_progress_in_a_log() -> None:
    file = StringIO()
    with Progress(file).stage("measuring", 12.5) as tell:
        tell(3.0, "round 1")
    assert re.fullmatch(r"measuring: 12.5 s\nmeasuring: 0\.\d s\n", file.getvalue())


@pytest.mark.parametrize(
    ("total", "unit", "told"),
    [
        (12, "texts", "measuring: 3 of 12 texts, round 1"),
        (None, "texts", "measuring: round 1"),
    ],
)
def test_a_log_hears_of_a_long_stage_four_times_a_minute(
    monkeypatch: pytest.MonkeyPatch, total: float | None, unit: str, told: str
) -> None:
    clock, file = FakeTime(), StringIO()
    monkeypatch.setattr(progress, "time", clock)
    with Progress(file).stage("measuring", total, unit) as tell:
        for _ in range(31):
            clock.now += 1
            tell(3.0, "round 1")
    assert file.getvalue().splitlines()[1:] == [told, told, "measuring: 31.0 s"]


@pytest.mark.parametrize("total", [None, 4])
def test_progress_on_a_terminal(total: int | None) -> None:
    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    file = Terminal()
    one = Progress(file)
    with one.stage("writing", total, "texts") as tell:
        tell(3, "[red]now")
        one.say("[red]so far")
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())
    assert "[red]so far" in shown
    assert "writing: [red]now" in shown
    assert ("3/4" in shown) == (total == 4)
