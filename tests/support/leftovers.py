"""Processes that a test run started and that outlive it: none, or the run has failed.

All of them inherit a variable whose value is this run's alone. A cluster that was up before has none of it, and is not
touched; the processes inside its pods belong to the cluster.
"""

from __future__ import annotations

import contextlib
import os
import signal
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from tests.support.waiting import NeverHappened, eventually

VARIABLE: Final = "PYTHON_TESTS_OF_DDPJOB"
"""One of those that `ddpjob run` passes on to ranks."""
SECONDS: Final = 60.0
OF_PYTHON: Final = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Python's own, which end with the process that runs the tests."""
OF_CLUSTER: Final = ("cluster.sh", "rm -rf")


def name_this_run() -> None:
    """Before anything is started."""
    os.environ.setdefault(VARIABLE, uuid.uuid4().hex)


def leftovers() -> list[str]:
    """`pid command` of each process of this run that does not end within SECONDS, besides this one."""
    try:
        eventually(lambda: not list(_alive()), "everything that the tests started has ended", SECONDS)
    except NeverHappened:
        return list(_alive())
    return []


def end(left: Iterable[str]) -> None:
    """End what is left: after Ctrl-C some fixtures do not come to their end, and an operator whose API server is gone
    computes for ever. A cluster takes itself down.
    """
    for line in left:
        pid, _, command = line.partition(" ")
        if not any(own in command for own in OF_CLUSTER):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def _alive() -> Iterator[str]:
    wanted = f"{VARIABLE}={os.environ[VARIABLE]}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) in (os.getpid(), os.getppid()):
            continue
        try:
            if wanted not in (process / "environ").read_bytes().split(b"\0"):
                continue
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue  # it has ended, or is another user's
        if command and not any(own in command for own in OF_PYTHON):
            yield f"{process.name} {command}"
