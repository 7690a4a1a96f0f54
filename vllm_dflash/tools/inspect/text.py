"""Printing an inspection: tables where a person looks, plain text elsewhere."""

from __future__ import annotations

import sys

from vllm_dflash.tools.inspect.inspection import Inspection
from vllm_dflash.tools.inspect.sections import Section, make_sections, verdict


def print_inspection(found: Inspection) -> None:
    """To standard output; what cannot be read is said on standard error."""
    sections, lines = make_sections(found), verdict(found)
    if sys.stdout.isatty():
        for section in sections:
            _print_rich(section)
        print()
    else:
        for section in sections:
            print(f"{plain(section)}\n")
    sys.stdout.flush()
    print("\n".join(lines), file=sys.stdout if found.error is None else sys.stderr)


def plain(section: Section) -> str:
    """Columns of text under a title, with no markup of any kind."""
    table = [section.columns, *section.rows] if section.columns else list(section.rows)
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))] if table else []
    lines = [section.title]
    for row in table:
        cells = [
            cell.rjust(width) if number >= section.right_from else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(f"  {'  '.join(cells)}".rstrip())
    return "\n".join(lines)


def _print_rich(section: Section) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table(show_header=bool(section.columns))
    width = len(section.columns) or len(section.rows[0])
    for number in range(width):
        table.add_column(
            section.columns[number] if section.columns else "",
            justify="right" if number >= section.right_from else "left",
        )
    for row in section.rows:
        table.add_row(*map(Text, row))  # names of models are no markup
    console.print()
    console.print(Text(section.title, style="bold"))
    console.print(table)
