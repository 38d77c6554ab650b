"""A file of lines on a volume that may be full or away for a while: nothing is written by half, nothing is lost.

Lines wait in memory until they are written. A write that fails in the middle is taken back, which a full volume
allows, so the file always ends with a whole line of ours and a later try begins where this one did. Adding a line
never waits for the volume, whichever thread is writing.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Sequence
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
                self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            with self._adding:
                data, added = "".join(self._waiting).encode(), self._added
            self._append(self._descriptor, data)
            with self._adding:
                # all but those that were added meanwhile
                while len(self._waiting) > self._added - added:
                    self._waiting.popleft()
            if durable:
                os.fsync(self._descriptor)

    def rewind(self, belongs: Callable[[bytes], bool]) -> None:
        """Keep the lines up to the first that does not belong or was cut short; forget those that wait.

        What is kept goes into a new file of the same name: a fenced attempt whose node was taken for lost may still
        have the old one open, and what it appends must not appear.
        """
        self.close()
        if not self.path.exists():
            return
        keep = 0
        with self.path.open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n") or not belongs(line):
                    break
                keep += len(line)
        with self._writing:
            try:
                self._descriptor = self._replaced(keep)
            except OSError:  # a full volume has no room for it; what it has can be cut all the same
                os.truncate(self.path, keep)

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
        try:
            while written < len(data):
                written += os.write(descriptor, data[written:])
        except OSError:
            # unless another attempt has written behind it by now
            if os.fstat(descriptor).st_size == before + written:
                os.ftruncate(descriptor, before)
            raise

    def _replaced(self, size: int) -> int:
        """Put the first `size` bytes into a file of their own, in the old one's place; its descriptor, for appending.

        It stays open from here on, so that nothing is lost if another attempt replaces the file.
        """
        new = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            shutil.copyfile(self.path, new)
            os.truncate(new, size)
            descriptor = os.open(new, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except OSError:
            new.unlink(missing_ok=True)
            raise
        try:
            os.fsync(descriptor)
            new.replace(self.path)
            Disk().fsync(self.path.parent)
        except OSError:
            os.close(descriptor)
            new.unlink(missing_ok=True)
            raise
        return descriptor
