"""What a check says: a level, one line, and the fix."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from ddpjob_operator.follow.doctor.facts import Unread
from ddpjob_operator.follow.table import printable, wrapped

_LEVEL_WIDTH, _CHECK_WIDTH = len("unknown"), len("pod security")


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    """It stops some jobs, or not for certain."""
    PROBLEM = "problem"
    """It stops a job that names nothing of its own, or its submission."""
    UNKNOWN = "unknown"
    """It could not be looked at."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    check: str
    level: Level
    message: str
    fix: str = ""

    def lines(self, width: int | None) -> list[str]:
        """Level, check and message, and the fix below; None as `width` wraps nothing."""
        head = f"{self.level:<{_LEVEL_WIDTH}}  {self.check:<{_CHECK_WIDTH}}  "
        indent = " " * len(head)
        lines = wrapped([head + printable(self.message)], width, indent)
        return [*lines, *wrapped([f"{indent}fix: {printable(self.fix)}"], width, indent)] if self.fix else lines


def ok(check: str, message: str) -> Finding:
    return Finding(check, Level.OK, message)


def warning(check: str, message: str, fix: str) -> Finding:
    return Finding(check, Level.WARNING, message, fix)


def problem(check: str, message: str, fix: str) -> Finding:
    return Finding(check, Level.PROBLEM, message, fix)


def unknown(check: str, unread: Unread) -> Finding:
    """Of what could not be read."""
    return Finding(check, Level.UNKNOWN, unread.why, unread.fix)


def summary(findings: Iterable[Finding]) -> str:
    """Such as `1 problem, 2 warnings, 0 unknown`."""
    levels = [finding.level for finding in findings]
    problems, warnings = levels.count(Level.PROBLEM), levels.count(Level.WARNING)
    return (
        f"{problems} {'problem' if problems == 1 else 'problems'}, "
        f"{warnings} {'warning' if warnings == 1 else 'warnings'}, {levels.count(Level.UNKNOWN)} unknown"
    )
