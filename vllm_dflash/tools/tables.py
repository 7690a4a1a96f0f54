"""Tables for terminals, pipes and Markdown."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import rich.console


@dataclass(frozen=True)
class Table:
    """Rows of text under a title."""

    title: str
    columns: Sequence[str]
    """Column heads; empty for rows of a name and a value."""
    rows: Sequence[Sequence[str]]
    words: Collection[int] = ()
    """Columns of words, aligned left; all others hold numbers, aligned right."""
    marked: Collection[int] = ()
    """Rows that a terminal shows in red."""

    def markdown(self) -> str:
        """Format as a section of a Markdown document."""
        heads = self.columns or [""] * self._width
        rules = ["---" if number in self.words else "---:" for number in range(self._width)]
        table = "\n".join(f"| {' | '.join(line)} |" for line in (heads, rules, *self.rows))
        return f"## {self.title}\n\n{table}\n"

    def plain(self) -> str:
        """Format as aligned plain text under the title."""
        table = [self.columns, *self.rows] if self.columns else list(self.rows)
        widths = [max(len(row[number]) for row in table) for number in range(self._width)]
        lines = [self.title]
        for row in table:
            cells = [
                cell.ljust(width) if number in self.words else cell.rjust(width)
                for number, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append(f"  {'  '.join(cells)}".rstrip())
        return "\n".join(lines)

    def rich(self) -> rich.console.RenderableType:
        """Format for a terminal."""
        import rich.console
        import rich.table
        from rich.text import Text

        table = rich.table.Table(show_header=bool(self.columns))
        for number in range(self._width):
            head = Text(self.columns[number]) if self.columns else ""
            table.add_column(head, justify="left" if number in self.words else "right")
        for number, row in enumerate(self.rows):
            # As `Text`, so that names of models are not taken for markup.
            table.add_row(*map(Text, row), style="bold red" if number in self.marked else "")
        # Not as the table's own title, which rich would wrap to the table's width.
        return rich.console.Group("", Text(self.title, style="bold"), table)

    @property
    def _width(self) -> int:
        return len(self.columns or self.rows[0])
