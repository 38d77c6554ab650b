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
- When the command ends, what is left of its descendants is killed, and this process exits as a container would
  report it: with the command's exit code, or 128 + the signal that ended it.

Run as a script, isolated from the environment of the pod: `python -I -S container.py SCRATCH COMMAND ARG…`.
SCRATCH is removed if the runner is gone, since nobody else is left to do it.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_CANNOT_START = 127
_TETHER = 0


def main(scratch: str, *command: str) -> NoReturn:
    wake = _wake_on_signals()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    first = _start(command)
    status = None
    while status is None:
        readable, _, _ = select.select([wake, _TETHER], [], [])
        if _TETHER in readable:
            runner_is_gone = os.read(_TETHER, 1) == b""
            _kill_descendants()
            if runner_is_gone:
                shutil.rmtree(scratch, ignore_errors=True)
            os._exit(128 + signal.SIGKILL)
        for number in os.read(wake, 512):
            if number in (signal.SIGTERM, signal.SIGINT):
                _send(first, number)
        status = _reap(first)
    _kill_descendants()
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _wake_on_signals() -> int:
    """A file descriptor that has one byte for each signal that arrived."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return reader


def _start(command: tuple[str, ...]) -> int:
    """Start the command as the pod's first process; it dies with this one."""
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
    """Kill and collect until there is no child left: one may fork between being found and being killed."""
    while True:
        for pid in _descendants():
            _send(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
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


def _send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):  # it has just ended
        os.kill(pid, number)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
