"""The connections of a gloo group, and how to end them.

`abort()` of a gloo group (torch 2.13) does not wake a collective that waits for a rank which is alive but has left: it
waits for its timeout. A connection that is shut down does: its collectives fail with "Connection closed by peer". gloo
connects all pairs of ranks while the group is made, so its connections are those that this has opened.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

DESCRIPTORS: Final = Path("/proc/self/fd")


class GroupSockets:
    """Those of the newest group. `shut_down` may be called from any thread, and as often as wanted."""

    def __init__(self) -> None:
        self._opened: Mapping[int, str] = {}

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Around the making of a group, during which no other thread should connect to anything."""
        before = _sockets()
        yield
        self._opened = {number: name for number, name in _sockets().items() if before.get(number) != name}

    def shut_down(self) -> None:
        for number, name in self._opened.items():
            with contextlib.suppress(OSError):
                if str((DESCRIPTORS / str(number)).readlink()) != name:
                    continue  # closed, and the number is another file's
                with socket.socket(fileno=os.dup(number)) as connection:
                    connection.getpeername()  # the listening socket of the group has none: gloo ends the process for it
                    connection.shutdown(socket.SHUT_RDWR)


def _sockets() -> dict[int, str]:
    """The sockets of this process, by descriptor, with a name that no other socket has."""
    found = {}
    for descriptor in DESCRIPTORS.iterdir():
        with contextlib.suppress(OSError):
            name = str(descriptor.readlink())
            if name.startswith("socket:"):
                found[int(descriptor.name)] = name
    return found
