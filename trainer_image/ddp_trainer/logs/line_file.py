"""A file of lines on a volume that may be full or away for a while: nothing is written by half, nothing is lost.

Lines wait in memory until they are written. A write that fails in the middle is taken back, which a full volume
allows, so the file always ends with a whole line of ours and a later try begins where this one did. Adding a line
never waits for the volume, whichever thread is writing.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ddp_trainer.snapshots.trust.disk import Disk

KEEP_LINES: Final = 100_000
"""Lines that wait at most, about 10 MB; beyond that the oldest are given up."""


class LineFile:
    """Appends to `path`, which is made with its folder at the first write. Any thread may call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: deque[str] = deque(maxlen=KEEP_LINES)
        self._added = 0
        self._descriptor: int | None = None
        self._is_named = False
        self._adding = threading.Lock()
        """Held for moments only."""
        self._writing = threading.Lock()
        """Held while the volume is waited for."""

    @property
    def added(self) -> int:
        """How many lines there have been so far."""
        return self._added

    def waiting(self, first: int | None = None) -> Sequence[str]:
        """Lines that are not in the file yet, each with its newline; of the `first` that were added, or of all."""
        with self._adding:
            later = 0 if first is None else self._added - first
            return tuple(self._waiting)[: max(0, len(self._waiting) - later)]

    def add(self, line: str) -> None:
        """Put a line, without its newline, behind those that wait."""
        with self._adding:
            self._waiting.append(line + "\n")
            self._added += 1

    def write_out(self, *, durable: bool = False) -> None:
        """Write what waits; `durable` comes back when it would outlive a crash of the node.

        Raises OSError; then the file is as it was before, and the lines go on waiting.
        """
        with self._writing:
            if self._descriptor is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
                self._is_named = False
            with self._adding:
                data, added = "".join(self._waiting).encode(), self._added
            self._append(self._descriptor, data)
            with self._adding:
                # all but those that were added meanwhile
                while len(self._waiting) > self._added - added:
                    self._waiting.popleft()
            if durable:
                os.fsync(self._descriptor)
                if not self._is_named:
                    # the name of a new file outlives a crash only once its folder does
                    Disk().fsync(self.path.parent)
                    self._is_named = True

    def close(self) -> None:
        """Let go of the file; lines that wait are lost, and a thread that is late has none left to write."""
        with self._adding:
            self._waiting.clear()
        with self._writing:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def _append(self, descriptor: int, data: bytes) -> None:
        """All of it or nothing. Raises OSError."""
        if not data:
            return
        before, written = os.fstat(descriptor).st_size, 0
        if before and os.pread(descriptor, 1, before - 1) != b"\n":
            data = b"\n" + data  # ends the line that a crash cut short
        try:
            while written < len(data):
                written += os.write(descriptor, data[written:])
        except OSError:
            # unless another process has written behind it by now
            if os.fstat(descriptor).st_size == before + written:
                os.ftruncate(descriptor, before)
            raise
