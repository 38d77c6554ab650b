"""A file of lines on a volume that may be full or away for a while: nothing is written by half, nothing is lost.

Lines wait in memory until they are written. A write that fails in the middle is taken back, which a full volume
allows, so the file always ends with a whole line of ours and a later try begins where this one did.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from ddp_trainer.snapshots.disk import Disk

KEEP_LINES: Final = 100_000
"""Lines that wait at most, about 10 MB; beyond that the oldest are given up."""


class LineFile:
    """Appends to `path`, which is made with its folder at the first write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: list[str] = []
        self._descriptor: int | None = None

    @property
    def waiting(self) -> Sequence[str]:
        """Lines that are not in the file yet, each with its newline."""
        return tuple(self._waiting)

    def add(self, line: str) -> None:
        """Put a line, without its newline, behind those that wait."""
        self._waiting.append(line + "\n")
        del self._waiting[:-KEEP_LINES]

    def write_out(self, *, durable: bool = False) -> None:
        """Write what waits; `durable` comes back when it would outlive a crash of the node.

        Raises OSError; then the file is as it was before, and the lines go on waiting.
        """
        if self._descriptor is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        data, written = "".join(self._waiting).encode(), 0
        before = os.fstat(self._descriptor).st_size
        try:
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
        except OSError:
            # unless another life of the job has written behind it by now
            if os.fstat(self._descriptor).st_size == before + written:
                os.ftruncate(self._descriptor, before)
            raise
        self._waiting.clear()
        if durable:
            os.fsync(self._descriptor)

    def rewind(self, belongs: Callable[[bytes], bool]) -> None:
        """Keep the lines up to the first that does not belong or was cut short; forget those that wait.

        What is kept goes into a new file of the same name: another life of the job, which somebody believes dead, may
        still have the old one open, and what that appends must end up nowhere.
        """
        self._waiting.clear()
        self.close()
        if not self.path.exists():
            return
        keep = 0
        with self.path.open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n") or not belongs(line):
                    break
                keep += len(line)
        try:
            self._descriptor = self._replaced(keep)
        except OSError:  # a full volume has no room for it; what it has can be cut all the same
            os.truncate(self.path, keep)

    def _replaced(self, size: int) -> int:
        """Put the first `size` bytes into a file of their own, in the old one's place; its descriptor, for appending.

        It stays open from here on, so that a later replacement by another life takes nothing of that one's with it.
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

    def close(self) -> None:
        """Let go of the file; lines that wait are lost. Raises nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
