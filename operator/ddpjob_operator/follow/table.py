"""A table as kubectl prints one: columns as wide as their cells, and no lines."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_GAP = "   "


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    heading: str
    importance: int = 9
    """Where a terminal is too narrow, the columns with the smallest numbers are left out first. 9: never."""


def text_table(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """The heading and one line a row. None as `width` is as wide as it gets, as in a pipe."""
    shown = list(range(len(columns)))
    lines = [[column.heading for column in columns], *rows]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    while width is not None and sum(widths[i] for i in shown) + len(_GAP) * (len(shown) - 1) > width:
        least = min(shown, key=lambda i: columns[i].importance)
        if columns[least].importance >= 9:
            break
        shown.remove(least)
    return [_GAP.join(line[i].ljust(widths[i]) for i in shown).rstrip() for line in lines]


def wrapped(lines: Iterable[str], width: int | None, indent: str) -> list[str]:
    """Lines of at most `width` characters; `indent` is before those that go on. None leaves them as they are."""
    if width is None:
        return list(lines)
    return [
        part
        for line in lines
        for part in textwrap.wrap(line, max(width, 20), subsequent_indent=indent, break_on_hyphens=False) or [""]
    ]


def printable(text: str) -> str:
    """`text` as one line without control characters, which a terminal would obey."""
    return visible(" ".join(text.split()))


def visible(line: str) -> str:
    """A line with its spaces, without control characters."""
    if line.isprintable():
        return line
    return "".join(character for character in line if character.isprintable() or character == "\t")
