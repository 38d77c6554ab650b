"""A test that takes longer than its timeout ends the process, and says first where it stood."""

from __future__ import annotations

import sys
import threading
from typing import TextIO, cast

import pytest


class _Stacks:
    """Writes to standard error what another thread than that of the tests writes, which is the one of a timeout: the
    rest is progress and a summary of one worker, and the run has its own.
    """

    def write(self, text: str) -> int:
        if threading.current_thread() is not threading.main_thread():
            cast(TextIO, sys.__stderr__).write(text)
        return len(text)

    def flush(self) -> None:
        cast(TextIO, sys.__stderr__).flush()


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """The standard output of a worker of pytest-xdist goes nowhere, and pytest-timeout writes the stacks to it."""
    if hasattr(session.config, "workerinput"):
        session.config.get_terminal_writer()._file = cast(TextIO, _Stacks())
