"""Tables and progress: on a terminal, in a pipe, as Markdown."""

from __future__ import annotations

import re
from io import StringIO

import pytest

from vllm_dflash.tools.console import print_report
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


def test_a_pipe_gets_notes_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    print_report([NUMBERS, NAMES], ["[bold]note", "x" * 200])
    assert capsys.readouterr().out.splitlines()[-2:] == ["[bold]note", "x" * 200]


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_without_a_cursor_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich would show a bar there only when it is done."""
    monkeypatch.setenv("TERM", "dumb")
    file = Terminal()
    with Progress(file).stage("writing"):
        assert file.getvalue() == "writing\n"


def test_columns_stay_together_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    file, line = Terminal(), "a column   " * 5 + "the last"
    Progress(file).say(line)
    assert file.getvalue() == f"{line}\n"


@pytest.mark.parametrize("total", [None, 4])
def test_progress_on_a_terminal(total: int | None) -> None:
    file = Terminal()
    one = Progress(file)
    with one.stage("writing", total, "texts") as tell:
        tell(3, "[red]now")
        one.say("[red]so far")
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())
    assert "[red]so far" in shown
    assert "writing: [red]now" in shown
    assert ("3/4" in shown) == (total == 4)
