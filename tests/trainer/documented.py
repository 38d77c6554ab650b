"""What docs/trainer.md says: its blocks, and the messages that it promises.

A message is a line of a `text` block, in which `<word>` stands for something that changes and `…` for anything at all.
Tests of messages take them from there, so a message that is reworded without its documentation fails them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "trainer.md"

_PART = re.compile(r"^(?P<level>#{1,4}) (?P<heading>.+)$|^```(?P<info>.*)\n(?P<text>(?:.*\n)*?)```$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block: the heading that it stands under, its language, and what else its first line says."""

    heading: str
    language: str
    attributes: dict[str, str]
    text: str


def blocks(page: str | None = None) -> list[Block]:
    """All blocks of the page, in order."""
    found, heading = [], ""
    for part in _PART.finditer(PAGE.read_text() if page is None else page):
        if part["heading"]:
            heading = part["heading"]
            continue
        language, *attributes = part["info"].split()
        found.append(Block(heading, language, dict(pair.split("=") for pair in attributes), part["text"]))
    return found


def pattern(line: str) -> re.Pattern[str]:
    """What a documented line matches in real output."""
    parts = re.split(r"(<[a-z]+>|…)", line.strip())
    return re.compile("".join(_piece(part) for part in parts), re.DOTALL)


def _piece(part: str) -> str:
    if part == "…":
        return ".*?"
    return r"\S.*?" if re.fullmatch(r"<[a-z]+>", part) else re.escape(part)


def message(heading: str, number: int = 0) -> re.Pattern[str]:
    """The documented message with that number below that heading. KeyError where there is none."""
    lines = [line for block in blocks() if block.heading == heading and block.language == "text"
             for line in block.text.splitlines()]  # fmt: skip
    if number >= len(lines):
        raise KeyError(f"{PAGE.name} has no message {number} under {heading!r}")
    return pattern(lines[number])
