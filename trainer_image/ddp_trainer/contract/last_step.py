"""The number of a rank's last step, in a file of its own beside the heartbeat, written in every step."""

from __future__ import annotations

import contextlib
import mmap
import struct
from pathlib import Path
from typing import Final

_STEP: Final = struct.Struct("<qq")
"""A pid, and the number of its last step."""


class LastStep:
    """Memory that the file keeps when this process dies: a system call in each step would cost ten times as much."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._memory: mmap.mmap | None = None

    def write(self, pid: int, step: int) -> None:
        """A file system that refuses is ignored: the next step tries again."""
        if self._memory is None:
            with contextlib.suppress(OSError):
                self._memory = _mapped(self._path, _STEP.pack(pid, step))
            return
        _STEP.pack_into(self._memory, 0, pid, step)


def read_last_step(path: Path, pid: int) -> int | None:
    """The last step of the process `pid`; None where it has written none."""
    try:
        writer, step = _STEP.unpack(path.read_bytes())
    except (OSError, struct.error):
        return None
    return step if writer == pid else None


def _mapped(path: Path, first: bytes) -> mmap.mmap:
    """The file's memory, which is written to first: where there is none, that is an OSError and no SIGBUS."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w+b", buffering=0) as file:
        file.write(first)
        return mmap.mmap(file.fileno(), len(first))
