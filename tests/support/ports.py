"""TCP ports of this machine that are free now. Another process may take one before it is used."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack, suppress


def free_port() -> int:
    """One at random, since other tests look too, below those that the kernel gives to outgoing connections."""
    for port in random.sample(range(11000, 26000), 100):
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    raise RuntimeError("none of a hundred ports is free")


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
