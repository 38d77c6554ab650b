"""Whether the memory-backed file system of the run directory is full.

It is the pod's /dev/shm, which data loader workers, NCCL and the script fill as well. A process that touches a page
there that it cannot have is ended by SIGBUS; one that writes gets ENOSPC. Neither says that it was not the volume.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

FULL_BELOW_BYTES: Final = 64 << 10
REMEMBERED_SECONDS: Final = 30.0
"""How long it counts as full after it was: what filled it up goes away with the processes that it ended."""


class RunMemory:
    """`look` often; `problem` says in words that it is full, or was a moment ago."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._full_at: float | None = None

    def look(self, now: float) -> bool:
        """Whether it is full now, and was not before. `now` is monotonic seconds."""
        before = self._full_at
        if _is_full(self._run_dir):
            self._full_at = now
            return before is None
        return False

    def problem(self, now: float | None = None) -> str | None:
        """None if it is not and was not full."""
        now = time.monotonic() if now is None else now
        if self._full_at is None or now - self._full_at > REMEMBERED_SECONDS:
            return None
        size = os.statvfs(self._run_dir)
        mib = size.f_blocks * size.f_frsize >> 20
        return f"no space left on device in {self._run_dir} (/dev/shm of the pod, {mib} MiB): raise its size"


def _is_full(path: Path) -> bool:
    try:
        found = os.statvfs(path)
    except OSError:
        return False
    # a file system without a size, as an overlay may be, is never full
    return found.f_blocks > 0 and found.f_bavail * found.f_frsize < FULL_BELOW_BYTES
