"""What the ranks print on its way to the pod's log, line by line, with the lines of stderr kept that say why one ended.

Several ranks that print at once would mix their lines up, and nobody could tell whose they are. An untouched script
that dies in C or by `os._exit` leaves no exception; what it printed last is then the best account of why. Dumps of
stacks, which follow the cause and fill a screen, are left out. torchrun can only copy logs through files that grow in
the pod's memory, so each rank gets named pipes.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from pathlib import Path
from typing import Final, Literal, NamedTuple

from ddp_trainer.contract.messages import LineFilter, is_telling
from ddp_trainer.contract.run_dir import stderr_pipe

KEPT_LINES: Final = 20
TELLING_LINES: Final = 8
"""Lines that may say why the rank ended, kept however many others follow."""
TELLING_SECONDS: Final = 600.0
"""How long before the end they may be. NCCL's watchdog writes its own records for minutes before it aborts."""
_CHUNK: Final = 65536
_CHUNKS_AT_ONCE: Final = 4
"""A rank may write as fast as this process reads, which has other things to do, such as to pass on SIGTERM."""
_LONGEST_LINE: Final = 65536
"""Of what is longer, parts are passed on."""


class _Line(NamedTuple):
    number: int
    time: float
    """Monotonic seconds."""
    text: str


class Relay:
    """The read end of a pipe in which one rank prints, on its way to the same stream of this process. `prefix` goes
    before each line.
    """

    def __init__(self, path: Path, stream: Literal["stdout", "stderr"], prefix: str = "") -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        os.mkfifo(path, 0o600)
        # Open for writing too: the pipe then exists before its first writer and has no end between two of them.
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._stream = stream
        self._prefix = prefix.encode()
        self._partial = b""
        self._at_start = True
        """Of a line of the output."""

    def fileno(self) -> int:
        return self._fd

    def relay(self) -> bool:
        """Pass on what is there, up to a limit; never blocks on the rank. Whether there may be more."""
        for _ in range(_CHUNKS_AT_ONCE):
            try:
                chunk = os.read(self._fd, _CHUNK)
            except BlockingIOError:
                return False
            self._pass_on(chunk)
            if len(chunk) < _CHUNK:
                return False
        return True

    def drain(self) -> None:
        """Pass on all that is there once no rank writes any more: a last line without an end counts."""
        while self.relay():
            pass
        if self._partial:
            self._pass_on(b"\n")

    def close(self) -> None:
        """Let go of the pipe."""
        os.close(self._fd)

    def _pass_on(self, chunk: bytes) -> list[bytes]:
        """The lines that it ends."""
        # a progress bar ends its lines with a carriage return only
        lines = (self._partial + chunk).replace(b"\r\n", b"\n").splitlines(keepends=True)
        complete = lines and (lines[-1].endswith((b"\n", b"\r")) or len(lines[-1]) > _LONGEST_LINE)
        self._partial = b"" if complete or not lines else lines.pop()
        out = b"".join(self._prefix + line for line in lines)
        if out and not self._at_start:
            out = out.removeprefix(self._prefix)
        if lines:
            self._at_start = lines[-1].endswith((b"\n", b"\r"))
        if out:
            # the reader of the log may be gone; the ranks must not stop for that
            with contextlib.suppress(OSError):
                stream = sys.stdout if self._stream == "stdout" else sys.stderr
                stream.buffer.write(out)
                stream.buffer.flush()
        return lines


class StderrRelay(Relay):
    """The stderr of one rank, with the lines kept that may say why it ended."""

    def __init__(self, run_dir: Path, local_rank: int, prefix: str = "") -> None:
        super().__init__(stderr_pipe(run_dir, local_rank), "stderr", prefix)
        self._filter = LineFilter()
        self._lines = 0
        self._last: deque[_Line] = deque(maxlen=KEPT_LINES)
        self._telling: deque[_Line] = deque(maxlen=TELLING_LINES)

    @property
    def last_lines(self) -> list[str]:
        """The newest lines and the newest telling ones, oldest first."""
        if not self._last:
            return []
        first, newest = self._last[0].number, self._last[-1].time
        telling = [line for line in self._telling if line.number < first and newest - line.time <= TELLING_SECONDS]
        return [line.text for line in (*telling, *self._last)]

    def _pass_on(self, chunk: bytes) -> list[bytes]:
        lines = super()._pass_on(chunk)
        now = time.monotonic()
        for line in lines:
            self._keep(line.decode(errors="replace").rstrip(), now)
        return lines

    def _keep(self, text: str, now: float) -> None:
        if not self._filter.keeps(text):
            return
        self._lines += 1
        line = _Line(self._lines, now, text.strip())
        self._last.append(line)
        if is_telling(text):
            self._telling.append(line)
