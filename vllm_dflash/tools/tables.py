"""Tables of a report, for a terminal and as Markdown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import rich.console


@dataclass(frozen=True)
class Table:
    """Rows of text under a title."""

    title: str
    columns: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        """As a section of a Markdown document."""
        lines = [self.columns, ["---:"] * len(self.columns), *self.rows]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"## {self.title}\n\n{table}\n"

    def rich(self) -> rich.console.RenderableType:
        """For a terminal."""
        import rich.console
        import rich.table

        table = rich.table.Table()
        for column in self.columns:
            table.add_column(column, justify="right")
        for row in self.rows:
            table.add_row(*row)
        # Not the table's own title, which would be wrapped to its width.
        return rich.console.Group("", f"[bold]{self.title}[/bold]", table)
