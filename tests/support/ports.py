"""TCP ports of this machine that are free now. Another process may take one before it is used."""

from __future__ import annotations

import socket
from contextlib import ExitStack


def free_port() -> int:
    """One that the kernel chooses, of those that it hands out for a while to no other that asks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
