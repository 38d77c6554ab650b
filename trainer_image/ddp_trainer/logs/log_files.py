"""Log files on a volume that may be full, slow or away for a while: lines wait for it, and training never does.

Lines wait in memory until a thread has written them. A write that fails in the middle is taken back, which a full
volume allows, so a file always ends with a whole line and a later try begins where this one did. Some volumes say only
when a file is synced that they are full: lines are kept until then, and then they too are taken back.

What waits is bounded, and so is the wait at the end: beyond KEEP_LINES the oldest lines of a file are given up, and
what else the thread is to do while KEEP_JOBS wait, such as to pass points on to TensorBoard, is left out.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from ddp_trainer.contract.json_files import FULL
from ddp_trainer.contract.standard_error import say
from ddp_trainer.snapshots.trust.disk import Disk

KEEP_JOBS: Final = 1000
"""How many may wait behind one that the volume holds up; what comes after them is left out."""


class LogThread:
    """Does what it is given, one after another. All calls belong to the training thread, and `do` never waits."""

    def __init__(self) -> None:
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(KEEP_JOBS)
        self._thread: threading.Thread | None = None

    def do(self, job: Callable[[], None]) -> bool:
        """Have `job` done; False if so many wait that this one is left out, or the process ends."""
        if not self._starts():
            return False
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            return False
        return True

    def close(self, last: Callable[[], None], *, timeout: float) -> bool:
        """Do what waits and then `last`; False if that took longer than `timeout` seconds and was given up."""
        deadline = time.monotonic() + timeout
        if not self._starts():
            _done(last)
            return True
        assert self._thread is not None
        try:
            for job in (last, None):
                self._jobs.put(job, timeout=max(0.0, deadline - time.monotonic()))
        except queue.Full:
            return False
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            return False
        self._thread = None
        return True

    def _starts(self) -> bool:
        """Whether the thread runs now; not if it would begin only when exit handlers run, since Python 3.12."""
        if self._thread is None:
            # A daemon: a volume that hangs must not keep the process from ending.
            thread = threading.Thread(target=self._run, name="logs", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return False
            self._thread = thread
        return True

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            _done(job)


def _done(job: Callable[[], None]) -> None:
    try:
        job()
    except Exception as error:
        _to_stderr(f"a log is not written: {type(error).__name__}: {error}")


class WriteErrors:
    """Reports on stderr which logs cannot be written, each once until it can be again."""

    def __init__(self) -> None:
        self._refused: set[Path] = set()

    def report(self, path: Path, error: OSError) -> None:
        if path not in self._refused:
            self._refused.add(path)
            _to_stderr(
                f"{path} cannot be written: {error.strerror or error}. Training goes on, and lines wait in memory; "
                "free space on the volume or enlarge it"
            )

    def clear(self, path: Path) -> None:
        if path in self._refused:
            self._refused.discard(path)
            _to_stderr(f"{path} can be written again")

    def hung(self, directory: Path, seconds: float) -> None:
        _to_stderr(
            f"the last lines for {directory} are not written after {seconds:.0f} s: the volume hangs; check its "
            "server and its network"
        )


class LogFile:
    """A file of lines that the log thread writes out when it is asked to, durably with `is_durable`."""

    def __init__(self, path: Path, thread: LogThread, write_errors: WriteErrors, *, is_durable: bool = False) -> None:
        self.lines = LineFile(path)
        self._is_durable = is_durable
        self._thread = thread
        self._write_errors = write_errors
        self._is_asked = False
        self._must_be_durable = False
        """Before it can be written again: a volume may take what it refuses to make durable."""

    def write_soon(self) -> None:
        """Have all lines written that were added so far; does not wait for it."""
        if not self._is_asked:
            self._is_asked = True  # before the thread is asked, which may be done at once
            if not self._thread.do(functools.partial(self.write, durable=self._is_durable)):
                self._is_asked = False

    def write(self, *, durable: bool = False) -> None:
        """The same at once, and waiting for the volume. An error is reported, and the lines go on waiting."""
        # before the lines are looked at: one that is added from here on asks anew
        self._is_asked = False
        try:
            self.lines.write_out(durable=durable)
        except OSError as error:
            self._must_be_durable |= durable
            self._write_errors.report(self.lines.path, error)
        else:
            if durable or not self._must_be_durable:
                self._must_be_durable = False
                self._write_errors.clear(self.lines.path)

    def close(self) -> None:
        """Write what waits, durably where the volume can, and let go of the file. Waits for the volume."""
        self.write(durable=True)
        if self.lines.waiting():
            self.write()
        self.lines.close()


def _to_stderr(text: str) -> None:
    say(f"ddp_trainer: {text}")


KEEP_LINES: Final = 100_000
"""Lines that wait at most, about 10 MB; beyond that the oldest are given up."""
SYNC_LINES: Final = 1000
"""As many that are written but not durable are made so, whether that was asked for or not: each is kept until then."""


class LineFile:
    """Appends to `path`, which is made with its folder at the first write. Any thread may call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: deque[str] = deque(maxlen=KEEP_LINES)
        self._unsynced: list[str] = []
        """Lines in the file that are not durable."""
        self._added = 0
        self._descriptor: int | None = None
        self._is_named = False
        self._synced_size: int | None = None
        """Where the file ends without `_unsynced`; None where another process has written behind it."""
        self._size = 0
        """Where it ends with them, and without what a write that failed has left."""
        self._adding = threading.Lock()
        """Held for moments only."""
        self._writing = threading.Lock()
        """Held while the volume is waited for."""

    @property
    def added(self) -> int:
        """How many lines there have been so far."""
        return self._added

    def waiting(self) -> Sequence[str]:
        """Lines that are not in the file yet, each with its newline."""
        with self._adding:
            return tuple(self._waiting)

    def not_durable(self, first: int) -> Sequence[str]:
        """Of the `first` lines that were added, those that a crash of the node may take, each with its newline.

        Another thread may have written since what could not be made durable: such lines are among them.
        """
        with self._adding:
            lines = (*self._unsynced, *self._waiting)
            return lines[: max(0, len(lines) - (self._added - first))]

    def add(self, line: str) -> None:
        """Put a line, without its newline, behind those that wait."""
        with self._adding:
            self._waiting.append(line + "\n")
            self._added += 1

    def write_out(self, *, durable: bool = False) -> None:
        """Write what waits; `durable` comes back when it would outlive a crash of the node.

        Raises OSError; then the lines go on waiting, and those that could not be made durable wait again.
        """
        with self._writing:
            try:
                descriptor = self._opened()
                refusal = self._append_waiting(descriptor)
            except OSError:
                self._save_unsynced()
                raise
            if durable or len(self._unsynced) >= SYNC_LINES:
                try:
                    self._sync(descriptor)
                except OSError as error:
                    self._take_back(error)
                    raise
            if refusal is not None:
                raise refusal

    def close(self) -> None:
        """Let go of the file; lines that wait are lost, and a thread that is late has none left to write."""
        with self._adding:
            self._waiting.clear()
        with self._writing:
            with self._adding:
                self._unsynced.clear()
            self._synced_size = None
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def _opened(self) -> int:
        if self._descriptor is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._is_named = False
            self._cut(self._descriptor)  # what could not be taken back before
            self._synced_size = self._size = os.fstat(self._descriptor).st_size
        return self._descriptor

    def _append_waiting(self, descriptor: int) -> OSError | None:
        """Write what waits. Returns the error of a volume that is full, on which what it took before is safe."""
        with self._adding:
            lines, added = list(self._waiting), self._added
        try:
            self._append(descriptor, "".join(lines).encode())
        except OSError as error:
            if error.errno not in FULL:
                raise
            return error
        with self._adding:
            # all but those that were added meanwhile
            while len(self._waiting) > self._added - added:
                self._waiting.popleft()
            self._unsynced += lines
        return None

    def _sync(self, descriptor: int) -> None:
        os.fsync(descriptor)
        if not self._is_named:
            # the name of a new file outlives a crash only once its folder does
            Disk().fsync(self.path.parent)
            self._is_named = True
        with self._adding:
            self._unsynced.clear()
        self._synced_size = self._size

    def _save_unsynced(self) -> None:
        """After a write that failed: what was written before it may be safe for long, and is if it can be synced."""
        if self._descriptor is not None and self._unsynced:
            try:
                self._sync(self._descriptor)
            except OSError as error:
                self._take_back(error)
        self._let_go()

    def _take_back(self, error: OSError) -> None:
        """Have lines wait again that could not be synced: the kernel may have dropped them."""
        with self._adding:
            self._waiting = deque([*self._unsynced, *self._waiting], maxlen=KEEP_LINES)
            self._unsynced.clear()
        # On a volume that is full they go at once. Elsewhere they may have come through all the same, and stay until
        # they can be written again.
        if error.errno in FULL and self._descriptor is not None:
            with contextlib.suppress(OSError):
                self._cut(self._descriptor)
        self._let_go()

    def _let_go(self) -> None:
        """Have the next write open the file anew: a client of CephFS or NFS that has lost its session leaves
        descriptors that fail for ever.
        """
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _cut(self, descriptor: int) -> None:
        """Take out of the file what is written again. A newer attempt may have written there since: then it stays,
        and is in the file twice, which readers allow.
        """
        if self._synced_size is None:
            return
        with self._adding:
            again = "".join(self._waiting).encode()
        count = os.fstat(descriptor).st_size - self._synced_size
        if not 0 < count <= len(again) + 1:
            return
        there = os.pread(descriptor, count, self._synced_size)
        # the newline ends the line that a crash cut short
        if len(there) == count and again.startswith(there.removeprefix(b"\n")):
            os.ftruncate(descriptor, self._synced_size)

    def _append(self, descriptor: int, data: bytes) -> None:
        """All of it or nothing. Raises OSError."""
        if not data:
            return
        before, written = os.fstat(descriptor).st_size, 0
        if before != self._size:
            self._synced_size = None
        self._size = before
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
        self._size = before + written
