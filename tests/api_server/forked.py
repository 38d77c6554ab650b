"""Operators that are forked from a process which has imported what an operator imports: that takes more than a second
of processor time, and most tests here start one of their own.

The rest is as with a new process: the module from its first line, environment, folder, log, signals and exit code.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.trainer.forked.start import Forked

MODULES = ("ddpjob_operator.main", "tests.api_server.seeded_bugs")
"""What is started so; an operator that is measured is a new process."""
IMPORTED = (
    "kopf",
    "uvloop",
    "ddpjob_operator.cluster.child_watch",
    "ddpjob_operator.cluster.controller",
    "ddpjob_operator.runtime.access",
    "ddpjob_operator.runtime.certificate",
    "ddpjob_operator.runtime.webhook",
    "ddpjob_operator.server",
    "ddpjob_operator.tenancy",
    "ddpjob_operator.watching.handlers",
)
PAUSE_SECONDS = 0.02


def can_be_forked(command: Sequence[str]) -> bool:
    """Whether it is one of these modules that is run."""
    return list(command[:2]) == [sys.executable, "-m"] and command[2] in MODULES


class ForkedOperator:
    """As an asyncio.subprocess.Process. It ends with the process of the tests."""

    def __init__(self, command: Sequence[str], folder: Path, environment: dict[str, str], log: int) -> None:
        self._process = Forked(list(command[1:]), environment, log, imported=IMPORTED, folder=folder)
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    async def wait(self) -> int:
        while (code := self.returncode) is None:  # noqa: ASYNC110
            await asyncio.sleep(PAUSE_SECONDS)
        return code

    def send_signal(self, number: int) -> None:
        """At once, and not through the server: what a test does next must find it stopped."""
        if self.returncode is None:
            os.kill(self.pid, number)
