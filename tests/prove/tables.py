"""Tables of a proof: one value, shown to a person in the terminal and as Markdown in the documentation."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.table import Table as Shown

HOLDS: Final = "holds"
BROKEN: Final = "BROKEN"
_NUMBER: Final = re.compile(r"[-+−]?[\d,.]+(e[-+]?\d+)?|[–-]|")


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under `columns`. Columns of nothing but numbers are set to the right."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def is_numeric(self, column: int) -> bool:
        return all(_NUMBER.fullmatch(row[column]) for row in self.rows)


def verdict(problem: str | None) -> str:
    """What stands in a table's last column."""
    return HOLDS if problem is None else BROKEN


def markdown(table: Table) -> str:
    """The table as GitHub shows it, under a bold title."""
    rule = ["---:" if table.is_numeric(column) else "---" for column in range(len(table.columns))]
    lines = [table.columns, tuple(rule), *table.rows]
    return f"**{table.title}**\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def show(table: Table, console: Console) -> None:
    """The table in the terminal, what is broken in red."""
    shown = Shown(title=table.title, title_justify="left", title_style="bold")
    for column, name in enumerate(table.columns):
        shown.add_column(name, justify="right" if table.is_numeric(column) else "left")
    for row in table.rows:
        shown.add_row(*row, style="bold red" if row[-1] == BROKEN else None)
    console.print(shown, "")


def small(difference: float) -> str:
    """A difference between two losses, to two digits."""
    return "0" if difference == 0 else f"{difference:.1e}"
