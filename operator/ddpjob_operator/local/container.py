"""Process 1 of a pod on this machine: runs one command, and ends everything that the command ever started.

A container's processes end with its first process, because the kernel ends the whole PID namespace. Here, without
root and without namespaces, this process gives the same promise:

- It is the subreaper (prctl(2), PR_SET_CHILD_SUBREAPER) of all its descendants. torchrun starts every rank in a
  session of its own, which a signal to the pod's process group would miss; orphans come back here instead of to
  init.
- Its standard input is a tether, a pipe whose other end only the runner holds. A byte on it means: kill every
  process of the pod. Its end means the same, and also that the runner is gone: it was killed, and could not say
  good-bye.
- SIGTERM and SIGINT are handed on to the command alone, as the kubelet does.
- When the command ends, what is left of its descendants is killed, as far as they are this user's, and this process
  exits as a container would report it: with the command's exit code, or 128 + the signal that ended it.
- What the command prints goes through a pipe to the log, which is standard output. A disk that is full must not end
  the command, as it would if that wrote to the log itself: lines wait until there is room.

Run as a script, isolated from the environment of the pod: `python -I -S container.py SCRATCH HEADER COMMAND ARG…`.
SCRATCH is removed if the runner is gone, since nobody else is left to do it. HEADER is the first line in the log.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_CANNOT_START = 127
_TETHER = 0
_LOG = 1
_MOST_WAITING = 1 << 20
"""Bytes that wait for room on the disk at most; then the oldest are left out."""
_SECONDS_BETWEEN_TRIES = 5.0
_CHUNK = 65536
_LOOKS_FOR_THE_LAST = 5
_LOOKS_FOR_THE_KILLED = 600
_SECONDS_BETWEEN_LOOKS = 0.05


def main(scratch: str, header: str, *command: str) -> NoReturn:
    wake = _wake_on_signals()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    output = _Output()
    output.add(f"{header}\n".encode())
    first = _start(command, output.given)
    os.close(output.given)
    status = None
    while status is None:
        readable, _, _ = select.select([wake, _TETHER, *output.readable], [], [], output.seconds_to_next_try)
        if _TETHER in readable:
            runner_is_gone = os.read(_TETHER, 1) == b""
            _kill_descendants()
            output.finish()
            if runner_is_gone:
                shutil.rmtree(scratch, ignore_errors=True)
            os._exit(128 + signal.SIGKILL)
        output.pass_on()
        if wake not in readable:
            continue
        for number in os.read(wake, 512):
            if number in (signal.SIGTERM, signal.SIGINT):
                _send(first, number)
        status = _reap(first)
    _kill_descendants()
    output.finish()
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


class _Output:
    """What the pod prints, on its way to the log. `given` is the end of the pipe that the pod writes to."""

    def __init__(self) -> None:
        self._pipe, self.given = os.pipe()
        os.set_blocking(self._pipe, False)
        self.readable = [self._pipe]
        """Empty once no process of the pod has the pipe open."""
        self._waiting = bytearray()
        self._left_out = 0
        self._ends_line = True
        """Whether the log does."""

    @property
    def seconds_to_next_try(self) -> float | None:
        return _SECONDS_BETWEEN_TRIES if self._waiting else None

    def pass_on(self) -> None:
        """A part of what has come, so that signals do not wait behind a pod that prints without an end."""
        self.add(self._read())

    def finish(self) -> None:
        """The rest; no process of the pod is left."""
        while chunk := self._read():
            self.add(chunk)

    def add(self, data: bytes) -> None:
        """Write it behind what waits, as far as there is room."""
        self._waiting += data
        try:
            self._put_note()
            while self._waiting:
                written = os.write(_LOG, self._waiting)
                self._ends_line = self._waiting[written - 1] == ord("\n")
                del self._waiting[:written]
        except OSError:  # the next try writes it
            self._forget_oldest()

    def _read(self) -> bytes:
        try:
            chunk = os.read(self._pipe, _CHUNK)
        except BlockingIOError:
            return b""
        if not chunk:
            self.readable = []
        return chunk

    def _put_note(self) -> None:
        """In the place of what was left out. Raises OSError where there is still no room."""
        if self._left_out:
            begin = "" if self._ends_line else "\n"
            note = f"{begin}ddpjob: {self._left_out} bytes are not here: the disk was full\n".encode()
            self._waiting[:0] = note[os.write(_LOG, note) :]
            self._left_out = 0

    def _forget_oldest(self) -> None:
        """Whole lines, where there are some."""
        if (excess := len(self._waiting) - _MOST_WAITING) > 0:
            excess = (self._waiting.find(b"\n", excess) + 1) or excess
            del self._waiting[:excess]
            self._left_out += excess


def _wake_on_signals() -> int:
    """A file descriptor that has one byte for each signal that arrived."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return reader


def _start(command: tuple[str, ...], output: int) -> int:
    """Start the command as the pod's first process, which prints to `output`; it dies with this one."""
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(128 + signal.SIGKILL)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, _TETHER)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.execvp(command[0], command)  # noqa: S606 - an argv, which no shell should read
    except OSError as error:
        print(f"cannot start {command[0]!r}: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(_CANNOT_START)


def _reap(first: int) -> int | None:
    """Collect every child that has ended; the wait status of `first` if it is among them."""
    status = None
    while True:
        try:
            pid, ended = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == 0:
            return status
        if pid == first:
            status = ended


def _kill_descendants() -> None:
    """Kill and collect until there is no child left: one may fork between being found and being killed. A child that
    may not be killed, as one that sudo has started, is left when a few looks have found no other. What was killed may
    take seconds to be gone, as with the memory of a GPU: the next attempt needs it.
    """
    looks, most = 0, _LOOKS_FOR_THE_LAST
    while looks < most:
        found = _descendants()
        killed = [pid for pid in found if _send(pid, signal.SIGKILL)]
        most = _LOOKS_FOR_THE_KILLED if killed else _LOOKS_FOR_THE_LAST
        try:
            if os.waitpid(-1, 0 if found and killed == found else os.WNOHANG)[0] == 0:
                looks += 1
                time.sleep(_SECONDS_BETWEEN_LOOKS)
        except ChildProcessError:
            return


def _descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # ended meanwhile
            continue
        children.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    found = list(children.get(os.getpid(), ()))
    for pid in found:
        found.extend(children.get(pid, ()))
    return found


def _send(pid: int, number: int) -> bool:
    """Whether this user may."""
    with suppress(ProcessLookupError):  # it has just ended
        try:
            os.kill(pid, number)
        except PermissionError:
            return False
    return True


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
