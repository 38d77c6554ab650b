"""A test that takes longer than its timeout ends the process, and says first where it stood."""

from __future__ import annotations

import sys

import pytest


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """The standard output of a worker of pytest-xdist goes nowhere, and pytest-timeout writes the stacks to it."""
    if hasattr(session.config, "workerinput"):
        session.config.get_terminal_writer()._file = sys.__stderr__
