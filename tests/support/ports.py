"""TCP ports of this machine that are free now. Another program may take one before it is used."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

FIRST_PORT, LAST_PORT = 11000, 15999
"""Below those of the test cluster, of `ddpjob run`, and those that the kernel gives to outgoing connections."""


def free_port() -> int:
    """One that no other test process is given before all the others were: the one that asked listens only later."""
    cursor = Path(tempfile.gettempdir()) / f"ddpjob-test-ports-{os.getuid()}"
    with cursor.open("a+") as last_given:
        fcntl.flock(last_given, fcntl.LOCK_EX)
        last_given.seek(0)
        port = int(last_given.read() or LAST_PORT)
        for _ in range(100):
            port = port + 1 if port < LAST_PORT else FIRST_PORT
            with suppress(OSError), socket.socket() as probe:
                probe.bind(("", port))
                last_given.truncate(0)
                last_given.write(str(port))
                return port
    raise RuntimeError("a hundred ports in a row are taken")


def free_ports(count: int) -> int:
    """The first of so many ports in a row, below those that the kernel chooses from."""
    for first in range(27000, 32000, count):
        with ExitStack() as probes:
            try:
                for port in range(first, first + count):
                    probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise RuntimeError(f"no {count} ports in a row are free")
