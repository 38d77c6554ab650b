"""The thread that writes a run's logs: a volume that is slow or hangs holds up this thread, and never training.

Training only ever puts something into memory here, and both what waits and the wait at the end are bounded.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ddp_trainer.logs.line_file import LineFile

KEEP_JOBS: Final = 1000
"""How many may wait behind one that the volume holds up; what comes after them is left out."""


class LogThread:
    """Does what it is given, one after another. All calls belong to the training thread, and `do` never waits."""

    def __init__(self) -> None:
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(KEEP_JOBS)
        self._thread: threading.Thread | None = None

    def do(self, job: Callable[[], None]) -> bool:
        """Have `job` done; False if so many wait that this one is left out."""
        self._start()
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            return False
        return True

    def close(self, last: Callable[[], None], *, timeout: float) -> bool:
        """Do what waits and then `last`; False if that took longer than `timeout` seconds and was given up."""
        deadline = time.monotonic() + timeout
        self._start()
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

    def _start(self) -> None:
        if self._thread is None:
            # A daemon: a volume that hangs must not keep the process from ending.
            self._thread = threading.Thread(target=self._run, name="logs", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:
                _say(f"a log is not written: {type(error).__name__}: {error}")


class WriteErrors:
    """Reports on stderr which logs cannot be written, each once until it can be again."""

    def __init__(self) -> None:
        self._refused: set[Path] = set()

    def report(self, path: Path, error: OSError) -> None:
        if path not in self._refused:
            self._refused.add(path)
            _say(
                f"{path} cannot be written: {error.strerror or error}. Training goes on, and lines wait in memory; "
                "free space on the volume or enlarge it"
            )

    def clear(self, path: Path) -> None:
        if path in self._refused:
            self._refused.discard(path)
            _say(f"{path} can be written again")

    def hung(self, directory: Path, seconds: float) -> None:
        _say(
            f"the last lines for {directory} are not written after {seconds:.0f} s: the volume hangs; check its "
            "server and its network"
        )


class LogFile:
    """A file of lines that the log thread writes out when it is asked to."""

    def __init__(self, path: Path, thread: LogThread, write_errors: WriteErrors) -> None:
        self.lines = LineFile(path)
        self._thread = thread
        self._write_errors = write_errors
        self._is_asked = False

    def write_soon(self) -> None:
        """Have all lines written that were added so far; does not wait for it."""
        if not self._is_asked:
            self._is_asked = self._thread.do(self.write)

    def write(self, *, durable: bool = False) -> None:
        """The same at once, and waiting for the volume. An error is reported, and the lines go on waiting."""
        # before the lines are looked at: one that is added from here on asks anew
        self._is_asked = False
        try:
            self.lines.write_out(durable=durable)
        except OSError as error:
            self._write_errors.report(self.lines.path, error)
        else:
            self._write_errors.clear(self.lines.path)


def _say(text: str) -> None:
    print(f"ddp_trainer: {text}", file=sys.stderr, flush=True)
