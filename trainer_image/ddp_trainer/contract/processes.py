"""The processes of this pod, from /proc: who is whose child, who is stopped, and how none outlives the launcher."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with(parent: int) -> None:
    """SIGKILL for this process as soon as `parent`, which started it, dies (prctl(2), PR_SET_PDEATHSIG)."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Descendants whose parent dies become children of this process, as for process 1 of a container."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap() -> dict[int, int]:
    """Collect every child that has ended: pid → exit code, negative for a signal. Never blocks."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = os.waitstatus_to_exitcode(status)


def descendants(pid: int) -> list[int]:
    """All processes below `pid`, parents first, zombies left out."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and (stat := _stat(int(entry.name))) is not None and stat[0] != "Z":
            children.setdefault(stat[1], []).append(int(entry.name))
    found = list(children.get(pid, ()))
    for child in found:  # grows while it is walked
        found.extend(children.get(child, ()))
    return found


def children(pid: int) -> list[int]:
    """The living children of `pid`."""
    return [child for child in descendants(pid) if (stat := _stat(child)) is not None and stat[1] == pid]


def state(pid: int) -> str | None:
    """The kernel's letter for what the process does (proc_pid_stat(5)): R, S, D, T, Z; None once it is gone."""
    stat = _stat(pid)
    return None if stat is None else stat[0]


def alive(pid: int) -> bool:
    return state(pid) not in (None, "Z", "X")


def send(pids: Iterable[int], signum: int) -> None:
    """Signal each process; one that is gone already is no error."""
    for pid in pids:
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            continue


def oom_kills(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Processes of this container that the kernel has killed for lack of memory (memory.events, cgroup v2 or v1)."""
    for path in (cgroup / "memory.events", cgroup / "memory" / "memory.oom_control"):
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    return 0


def _stat(pid: int) -> tuple[str, int] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # the name in parentheses may hold anything, spaces and parentheses included
    fields = text[text.rindex(")") + 2 :].split()
    return fields[0], int(fields[1])
