"""Tests that start processes are told apart from those that only call functions, by what they use.

A fixture that starts processes is decorated, and marks every test that uses it; a test that starts one itself has the
mark `processes`. A process that an unmarked test starts fails it, so that `make check` stays what it says.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import pytest

F = TypeVar("F", bound=Callable[..., Any])

MARK: Final = "processes"
STARTS: Final = frozenset({"os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"})
"""Events of https://docs.python.org/3/library/audit_events.html."""

_ATTRIBUTE: Final = "_starts_processes"
_forbidden_for: str | None = None
_installed = False


def starts_processes(fixture: F) -> F:
    """Below `@pytest.fixture`."""
    setattr(fixture, _ATTRIBUTE, True)
    return fixture


def mark(item: pytest.Item) -> None:
    """Give a test the mark if one of its fixtures starts processes."""
    fixtures = getattr(item, "_fixtureinfo", None)
    if fixtures is not None and any(
        getattr(definitions[-1].func, _ATTRIBUTE, False) for definitions in fixtures.name2fixturedefs.values()
    ):
        item.add_marker(MARK)


@contextmanager
def no_process(item: pytest.Item) -> Iterator[None]:
    """Fail a test without the mark as soon as it starts a process."""
    global _forbidden_for, _installed
    if not _installed:
        sys.addaudithook(_refuse)  # cannot be taken away again
        _installed = True
    _forbidden_for = None if item.get_closest_marker(MARK) else item.nodeid
    try:
        yield
    finally:
        _forbidden_for = None


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    is_start = event in STARTS and arguments[:1] != ("lscpu",)  # which NumPy 2.0 asks when it is imported
    if _forbidden_for is not None and is_start:
        raise AssertionError(f"{_forbidden_for} starts a process ({event} {arguments[:2]}): mark it with `{MARK}`")
