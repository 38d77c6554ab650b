"""What standard output can show: its width and its styles. In a pipe there is neither."""

from __future__ import annotations

import os
import shutil
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from ddpjob_operator.follow.lines import Line


class Style(StrEnum):
    """How a text is set off, as the codes of ECMA-48 (SGR)."""

    BOLD = "1"
    DIM = "2"
    YELLOW = "33"


_COLOURS = ("36", "33", "32", "35", "34", "96", "93", "92", "95", "94")
"""Of ranks: cyan, yellow, green, magenta and blue, then bright. Neither red, as errors are, nor black or white."""


def is_terminal(stream: TextIO | None = None) -> bool:
    """Whether a person reads `stream` (by default standard output) at once."""
    return (stream or sys.stdout).isatty()


def width() -> int | None:
    """Columns of the terminal; None if output goes elsewhere, where a line may be as long as it is."""
    return shutil.get_terminal_size().columns if is_terminal() else None


def styled(text: str, style: Style) -> str:
    """`text` in a style where standard output has styles and NO_COLOR (no-color.org) is not set."""
    return _set_off(text, style)


def numbered(text: str, number: int) -> str:
    """`text` in the colour of a number, such as a rank: neighbours have different ones. Otherwise as `styled`."""
    return _set_off(text, _COLOURS[number % len(_COLOURS)])


def print_line(line: Line) -> None:
    """On a terminal each rank has a colour."""
    print(f"{numbered(f'[rank {line.rank}]', line.rank)} {line.text}", flush=True)


def print_note(text: str) -> None:
    print(f"ddpjob: {text}", file=sys.stderr, flush=True)


def _set_off(text: str, code: str) -> str:
    plain = not is_terminal() or os.environ.get("NO_COLOR") or os.environ.get("TERM") in (None, "", "dumb")
    return text if plain else f"\x1b[{code}m{text}\x1b[0m"
