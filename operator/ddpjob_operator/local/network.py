"""Ports of this machine, and what a launcher says of itself over HTTP."""

from __future__ import annotations

import errno
import http.client
import random
import socket
from pathlib import Path

from ddpjob_operator.core.values.trainer_report import TrainerReport, read_status

LOOPBACK = "127.0.0.1"
_FIRST_PORT = 20000
_DEFAULT_EPHEMERAL_START = 32768
_TRIES = 1000
_RANDOM = random.SystemRandom()
"""Of its own: two programs that seed Python's generator alike would take the same ports at the same time."""


def free_port(taken: set[int]) -> int:
    """A free port that is not in `taken`; it is added there.

    It lies below the kernel's ephemeral range, so that no outgoing connection takes it before the launcher
    listens on it.

    Raises:
        OSError: if none was found.
    """
    last = max(_ephemeral_start(), _FIRST_PORT + _TRIES)
    for port in _RANDOM.sample(range(_FIRST_PORT, last), _TRIES):
        if port not in taken and _is_free(port):
            taken.add(port)
            return port
    raise OSError(errno.EADDRINUSE, f"no free TCP port between {_FIRST_PORT} and {last} on {LOOPBACK}")


def fetch_status(port: int, timeout: float = 2.0) -> TrainerReport | None:
    """The launcher's `/status` (docs/contracts.md section 4); None if there is no answer, or not one of version 1."""
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=timeout)
    try:
        connection.request("GET", "/status")
        answer = connection.getresponse()
        return read_status(answer.read()) if answer.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one in TIME_WAIT is free for a listener
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def _ephemeral_start() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        return _DEFAULT_EPHEMERAL_START
