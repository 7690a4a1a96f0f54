"""Tables for terminals, pipes and Markdown."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Rows of text under a title."""

    title: str
    columns: Sequence[str]
    """Column heads; empty for rows of a name and a value."""
    rows: Sequence[Sequence[str]]
    words: Collection[int] = ()
    """Columns of words, aligned left; all others hold numbers, aligned right."""

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

    @property
    def _width(self) -> int:
        return len(self.columns or self.rows[0])
