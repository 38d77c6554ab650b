"""Output whose reader may go away, as in `ddpjob run job.yaml | head`: the rest of it is dropped."""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO


class _Pipe(io.RawIOBase):
    """Writes to a file descriptor, and to the null device once nobody reads it any more."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def fileno(self) -> int:
        return self._descriptor

    def write(self, data: bytes) -> int:  # type: ignore[override]
        try:
            return os.write(self._descriptor, data)
        except BrokenPipeError:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self._descriptor)
            os.close(nothing)
            return len(data)


def outlive_readers() -> None:
    """From now on standard output and standard error take whatever is written to them."""
    sys.stdout, sys.stderr = _lasting(sys.stdout), _lasting(sys.stderr)


def _lasting(stream: TextIO) -> TextIO:
    try:
        descriptor = stream.fileno()
    except (AttributeError, OSError, ValueError):
        return stream  # none, or one that a test put there
    stream.flush()
    buffered = io.BufferedWriter(_Pipe(descriptor))  # type: ignore[type-var]
    return io.TextIOWrapper(buffered, encoding=stream.encoding, errors=stream.errors, line_buffering=True)
