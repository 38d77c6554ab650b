"""The processes of this pod, from /proc: who is whose child, who is stopped, and how none outlives the launcher."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ACTIVE_CPU_SHARE: Final = 0.02
"""Of one core, over the time between two looks: the threads of an idle Python need less."""
CPU_RESOLUTION_SECONDS: Final = 2 / os.sysconf("SC_CLK_TCK")
"""proc_pid_stat(5) rounds user and kernel mode down to a clock tick each. Less than both may be rounding alone, where
what a look itself costs is subtracted precisely: looks that follow each other fast would never find a process idle.
"""
ACTIVE_IO_BYTES: Final = 64 << 10
"""Read and written by processes that work between two looks."""

MOST_FILES: Final = 65536

_TRACKER: Final = b"resource_tracker import main"
"""In the command line of multiprocessing's, and of joblib's."""
_MANAGER: Final = b"torch_shm_manag\n"
"""torch's, as far as the kernel keeps the name of a program (proc_pid_comm(5))."""
_INTERRUPTS: Final = 1 << (signal.SIGINT - 1) | 1 << (signal.SIGTERM - 1)

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with(parent: int) -> None:
    """SIGKILL for this process as soon as `parent`, which started it, dies (prctl(2), PR_SET_PDEATHSIG)."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call
        os.kill(os.getpid(), signal.SIGKILL)


def allow_files(wanted: int = MOST_FILES) -> None:
    """Raise the limit of open files of this process, and of those that it starts, as far as it may. Some container
    runtimes begin with 1,024 (containerd 2), and torchrun's store, on node rank 0, has a connection of each rank: the
    ranks that come later would never meet. With live recovery, groups that are kept have up to 18 files each, and where
    a rank has no file left, it takes the others for silent.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Linux itself always has a bound here, but a sandbox may have none, which is -1
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


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


def command(pid: int) -> str:
    """The command line of a process, as far as it fits a line of a log; empty once it is gone."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ")
    except OSError:
        return ""
    return words.decode(errors="replace")[:80]


def has_open(pid: int, path: Path) -> bool:
    """Whether a process has this file open, as far as its descriptors can be read; they are not followed, since some
    may be of a volume that does not answer.
    """
    try:
        descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return True
    file = path.resolve()
    for descriptor in descriptors:
        with contextlib.suppress(OSError):  # it was closed meanwhile
            if descriptor.readlink() == file:
                return True
    return False


def removes_shared_memory(pid: int) -> bool:
    """Whether it removes what other processes have left in /dev/shm once these have ended, and ends then: the resource
    tracker of multiprocessing, and torch's manager for its sharing strategy `file_system`.

    Reading the command line of a process that the kernel holds on to may take as long as that does. So it is read only
    where neither SIGINT nor SIGTERM reaches the process, as with a tracker from its start.
    """
    try:
        if Path(f"/proc/{pid}/comm").read_bytes() == _MANAGER:
            return True
        fields = _stat_fields(pid)
        # blocked and ignored signals of proc_pid_stat(5), counted from the state, its third field
        if not fields or (int(fields[29]) | int(fields[30])) & _INTERRUPTS != _INTERRUPTS:
            return False
        return _TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def state(pid: int) -> str | None:
    """The kernel's letter for what the process does (proc_pid_stat(5)): R, S, D, T, Z; None once it is gone."""
    stat = _stat(pid)
    return None if stat is None else stat[0]


def alive(pid: int) -> bool:
    return state(pid) not in (None, "Z", "X")


def identity(pid: int) -> str:
    """What no other process of this machine has had: its id, and when it began, in clock ticks since the machine did.
    The id alone once the process is gone.
    """
    return " ".join([str(pid), *_stat_fields(pid)[19:20]])


def send(pids: Iterable[int], signum: int) -> None:
    """Signal each process; one that is gone already is no error, nor one of another user, such as sudo starts."""
    for pid in pids:
        try:
            os.kill(pid, signum)
        except (ProcessLookupError, PermissionError):
            continue


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process and its descendants have used so far."""

    cpu_seconds: float
    """Of all of them, in user and kernel mode, children that have ended included."""
    io_bytes: int
    """Read and written by all of them, sockets left out (proc_pid_io(5), rchar and wchar)."""
    written: int
    """Written by the process itself, its output included."""


def usage(pid: int) -> Usage:
    """What `pid` and its descendants have used; zeros once they are gone."""
    counted = [(_cpu_seconds(each), *io_bytes(each)) for each in (pid, *descendants(pid))]
    return Usage(
        cpu_seconds=sum(cpu for cpu, _, _ in counted),
        io_bytes=sum(read + written for _, read, written in counted),
        written=counted[0][2],
    )


def is_active(before: Usage, after: Usage, seconds: float) -> bool:
    """Whether the processes did anything in the `seconds` between two looks at them."""
    return (
        after.cpu_seconds - before.cpu_seconds >= max(ACTIVE_CPU_SHARE * seconds, CPU_RESOLUTION_SECONDS)
        or after.written > before.written
        or abs(after.io_bytes - before.io_bytes) >= ACTIVE_IO_BYTES
    )


def oom_kills(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Processes of this container that the kernel has killed for lack of memory (memory.events, cgroup v2 or v1)."""
    for path in (cgroup / "memory.events", cgroup / "memory" / "memory.oom_control"):
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    return 0


def _cpu_seconds(pid: int) -> float:
    fields = _stat_fields(pid)
    # utime, stime, cutime, cstime of proc_pid_stat(5), counted from the state, its third field
    return sum(int(ticks) for ticks in fields[11:15]) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def io_bytes(entry: int | str) -> tuple[int, int]:
    """Bytes read and written by the process or thread of that entry in /proc; zeros once it is gone."""
    try:
        lines = Path(f"/proc/{entry}/io").read_text().splitlines()
    except OSError:
        return 0, 0
    counts = dict(line.split(": ") for line in lines)
    return int(counts.get("rchar", 0)), int(counts.get("wchar", 0))


def _stat(pid: int) -> tuple[str, int] | None:
    fields = _stat_fields(pid)
    return (fields[0], int(fields[1])) if fields else None


def _stat_fields(pid: int) -> list[str]:
    """The fields of proc_pid_stat(5) from the state on; empty once the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return []
    # the name in parentheses may hold anything, spaces and parentheses included
    return text[text.rindex(")") + 2 :].split()
