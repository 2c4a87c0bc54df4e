"""Tables for the terminal and for Markdown."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from angpt.present.words import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable


BAR = r"\|"
"""A vertical bar inside a Markdown cell."""


class Strong(str):
    """A cell in bold."""

    __slots__ = ()


@dataclass(frozen=True)
class Table:
    """Column headings and rows of text."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    note: str = ""
    """Printed below the table."""
    left: Sequence[int] = (0,)
    """Indices of the columns aligned to the left; the others are aligned to the right."""
    prose: bool = False
    """True if cells are sentences: the terminal wraps them and separates rows by an empty line."""

    def rich(self) -> "RichTable":
        """The table for a terminal."""
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(
            title=Text(printable(self.title), style="table.title") if self.title else None,
            caption=Text(printable(self.note), style="table.caption") if self.note else None,
            title_justify="left",
            caption_justify="left",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            show_lines=self.prose,
        )
        for place, column in enumerate(self.columns):
            left = self.prose or place in self.left
            table.add_column(Text(printable(column)), justify="left" if left else "right", no_wrap=not self.prose)
        for row in self.rows:
            table.add_row(*(Text(printable(cell), style="bold" if isinstance(cell, Strong) else "") for cell in row))
        return table

    def markdown(self) -> str:
        """The table for a Markdown file, with its title and note."""
        rule = ["---" if self.prose or place in self.left else "---:" for place in range(len(self.columns))]
        lines = [_line(cells) for cells in (self.columns, rule, *self.rows)]
        above, below = ([f"**{self.title}**", ""] if self.title else []), (["", self.note] if self.note else [])
        return "\n".join([*above, *lines, *below])


def _line(cells: Iterable[str]) -> str:
    marked = (f"**{cell}**" if isinstance(cell, Strong) else cell for cell in cells)
    return f"| {' | '.join(cell.replace('|', BAR) for cell in marked)} |"


def replace_marked(page: str, name: str, text: str) -> str:
    """A page with other text between `<!-- name -->` and the next `<!-- end -->`; as it is if it has no such marks."""
    before, mark, rest = page.partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition("<!-- end -->\n")
    return before + mark + text + end + after if mark and end else page


def show(console: "Console", *tables: Table) -> None:
    """Print tables without wrapping cells, except in tables of prose; the terminal wraps lines that are too long."""
    from rich.console import Console

    made = [table.rich() for table in tables]
    options = console.options.update(width=10_000)
    widths = [console.measure(m, options=options).maximum for m, t in zip(made, tables, strict=True) if not t.prose]
    Console(file=console.file, width=max([console.width, *widths])).print(*made)
