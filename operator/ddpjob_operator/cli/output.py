"""Output whose reader may be slow, or go away.

A reader that has gone away, as in `ddpjob run job.yaml | head`: the rest is dropped. One that does not read, as a
terminal after Ctrl-S: `in_background` keeps what is written meanwhile, so that a run goes on. What cannot be written,
as to a full disk, is dropped too, and `unwritten` says so at the end. A character that the encoding of a terminal does
not have is replaced. A stream that is closed from the start, as by `>&-`, takes all and keeps nothing.
"""

from __future__ import annotations

import io
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, TextIO

MOST_BYTES: Final = 16 << 20
"""Kept for a reader that does not read; what comes after that is not shown."""


class Pipe(io.RawIOBase):
    """Writes to a file descriptor, and to the null device once nobody reads it any more."""

    def __init__(self, descriptor: int, most_bytes: int = MOST_BYTES) -> None:
        super().__init__()
        self._descriptor, self._most_bytes = descriptor, most_bytes
        self._waiting: deque[bytes] = deque()
        self._size = self._dropped = 0
        self._changed = threading.Condition()
        self._writer: threading.Thread | None = None
        self.failure: OSError | None = None
        """Why something could not be written; the first reason."""
        self.is_unread = False
        """Whether its reader has gone away."""

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def fileno(self) -> int:
        return self._descriptor

    def write(self, data: bytes) -> int:  # type: ignore[override]
        if self._writer is None:
            return self._write_now(data)
        with self._changed:
            if self._size + len(data) > self._most_bytes:
                self._dropped += len(data)
            else:
                if self._dropped:
                    self._keep(f"\n… {self._dropped} bytes are not shown, because nothing was read\n".encode())
                    self._dropped = 0
                self._keep(bytes(data))
                self._changed.notify_all()
        return len(data)

    def begin_background(self) -> None:
        """From now on `write` does not wait: a thread writes."""
        self._writer = threading.Thread(target=self._write_what_waits, name="write output", daemon=True)
        self._writer.start()

    def end_background(self) -> None:
        """Wait until all is written; from then on `write` waits again."""
        writer = self._writer
        assert writer is not None
        with self._changed:
            self._writer = None
            self._changed.notify_all()
        writer.join()

    def _keep(self, data: bytes) -> None:
        self._waiting.append(data)
        self._size += len(data)

    def _write_what_waits(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and self._writer is not None:
                    self._changed.wait()
                if not self._waiting:
                    return
                data = self._waiting[0]
            while data:
                data = data[self._write_now(data) :]
            with self._changed:
                self._size -= len(self._waiting.popleft())

    def _write_now(self, data: bytes) -> int:
        while True:
            try:
                return os.write(self._descriptor, data)
            except BlockingIOError:  # a terminal that another program has left so
                select.select([], [self._descriptor], [])
            except BrokenPipeError:
                self.is_unread = True
                nothing = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nothing, self._descriptor)
                os.close(nothing)
                return len(data)
            except OSError as error:  # a terminal that is gone, a disk that is full: the run goes on
                self.failure = self.failure or error
                return len(data)


def outlive_readers() -> None:
    """From now on standard output and standard error take whatever is written to them."""
    _open_closed()
    sys.stdout, sys.stderr = lasting(sys.stdout), lasting(sys.stderr)


def _open_closed() -> None:
    """Open the null device in the place of each standard stream that is closed: the next file that is opened, such as
    the log of a pod, would become that stream.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))


def unwritten() -> OSError | None:
    """Why some of the standard output could not be written; None if all of it was, or its reader had enough."""
    if not isinstance(sys.stdout, _Lasting):
        return None
    sys.stdout.flush()
    return sys.stdout.pipe.failure


def is_unread() -> bool:
    """Whether the reader of standard output has gone away, as far as a line has shown that."""
    return isinstance(sys.stdout, _Lasting) and sys.stdout.pipe.is_unread


@contextmanager
def in_background() -> Iterator[None]:
    """Neither standard output nor standard error is waited for, except at the end."""
    pipes = [stream.pipe for stream in (sys.stdout, sys.stderr) if isinstance(stream, _Lasting)]
    for pipe in pipes:
        pipe.begin_background()
    try:
        yield
    finally:
        for pipe in pipes:
            pipe.end_background()


class _Lasting(io.TextIOWrapper):
    """Text to a Pipe."""

    def __init__(self, pipe: Pipe, encoding: str, errors: str) -> None:
        super().__init__(io.BufferedWriter(pipe), encoding=encoding, errors=errors, line_buffering=True)  # type: ignore[type-var]
        self.pipe = pipe


def lasting(stream: TextIO) -> TextIO:
    """The same stream through a Pipe, unless it is none of the system's."""
    try:
        descriptor = stream.fileno()
    except (AttributeError, OSError, ValueError):
        return stream  # none, or one that a test put there
    stream.flush()
    errors = "replace" if stream.errors in (None, "strict") else stream.errors
    return _Lasting(Pipe(descriptor), stream.encoding, errors)
