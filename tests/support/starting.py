"""Tests that start processes are told apart from those that only call functions, by what they use.

A fixture that starts processes is decorated, and marks every test that uses it; a test that starts one itself has the
mark `processes`. A process that an unmarked test starts fails it, so that `make check` stays what it says.

After the last test of a worker fixtures of the whole session end, and may start processes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
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


class NoProcess:
    """Plugin: gives tests the mark if a fixture of theirs starts processes, and fails those without it that start one.

    `folders`: the tests that this holds for.
    """

    def __init__(self, *folders: Path) -> None:
        self._folders = tuple(f"{folder}{os.sep}" for folder in folders)

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        fixtures = getattr(item, "_fixtureinfo", None)
        if fixtures is not None and any(
            getattr(definitions[-1].func, _ATTRIBUTE, False) for definitions in fixtures.name2fixturedefs.values()
        ):
            item.add_marker(MARK)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        with self._refusing(item):
            yield

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        with self._refusing(item):
            yield

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        if nextitem is None:
            return (yield)
        with self._refusing(item):
            return (yield)

    @contextmanager
    def _refusing(self, item: pytest.Item) -> Iterator[None]:
        global _forbidden_for, _installed
        if not _installed:
            sys.addaudithook(_refuse)  # cannot be taken away again
            _installed = True
        is_held = str(item.path).startswith(self._folders)
        _forbidden_for = item.nodeid if is_held and not item.get_closest_marker(MARK) else None
        try:
            yield
        finally:
            _forbidden_for = None


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    is_start = event in STARTS and arguments[:1] != ("lscpu",)  # which NumPy 2.0 asks when it is imported
    if _forbidden_for is not None and is_start:
        raise AssertionError(f"{_forbidden_for} starts a process ({event} {arguments[:2]}): mark it with `{MARK}`")
