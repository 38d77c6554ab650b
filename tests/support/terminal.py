"""What was written on a terminal."""

from __future__ import annotations

import os
from contextlib import suppress


def all_shown(descriptor: int) -> str:
    """All of it, once the process at its other side has ended: the kernel hands it over in parts, some of them later
    than the process ends. Closes the descriptor.
    """
    parts: list[bytes] = []
    with suppress(OSError):  # as a terminal says that its other side is closed
        while part := os.read(descriptor, 1 << 16):
            parts.append(part)
    os.close(descriptor)
    return b"".join(parts).decode()
