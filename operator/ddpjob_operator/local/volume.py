"""The shared folder, which stands for the volume at /mnt/shared (docs/contracts.md section 6), and the lock of a job
on it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from ddpjob_operator.core.failure.log_tail import last_states, whole_lines
from ddpjob_operator.home import expanded

_SNAPSHOT = re.compile(r"(?:step|checkpoint)-(\d+)")
_TOKEN = re.compile(r"([0-9]{12})-[0-9]{6}-[A-Za-z0-9][A-Za-z0-9.-]{0,127}")
_DIGEST = re.compile(r"[0-9a-f]{64}|[0-9a-f]{32}")
_TAIL_LINES = 40
_TAIL_BYTES = 4096
_READ_BYTES = 256 << 10
"""Of the end of a log, in which a progress bar may have left many states before the lines that are of interest."""
_FOLDERS = ("datasets", "checkpoints", "logs")


class VolumeError(Exception):
    """The shared folder cannot be used. The message says why, and what to do."""


def open_shared(folder: Path) -> Path:
    """The folder as an absolute path, made if it is not there, and tried by writing into it.

    Raises:
        VolumeError: if it is no folder, cannot be written to, or is in a home directory that is not known.
    """
    try:
        shared = folder.expanduser().absolute()
    except RuntimeError as error:  # made as it is, it would be a folder with the name ~
        raise VolumeError(f"--shared {folder}: {folder.parts[0]} is no home directory; write the whole path") from error
    try:
        if shared.exists():
            for name in _FOLDERS:
                _make_hidden(shared / name)
            with suppress(OSError):  # a job without a script needs none
                _make_hidden(shared / "work")
        else:
            _make_hidden(shared)
            for name in _FOLDERS:
                (shared / name).mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=shared / "checkpoints") as probe:
            probe.write(b"\0")
            probe.flush()
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        fix = "delete files there, or choose another folder" if full else "choose a folder that you may write to"
        raise VolumeError(f"--shared {shared}: {error.strerror}; {fix}") from error
    return shared


def _make_hidden(folder: Path) -> None:
    """If it is not there, make a folder that is no code of the one that it is in, for git and for `ddpjob submit`."""
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".gitignore").write_text("*\n")


def written_by_runs(folder: Path) -> tuple[Path, ...]:
    """The shared folder, and what runs have written into it, which is no code where that of the code is the shared one.
    Nothing else in folders of these names, which may be packages of the code.
    """
    shared = expanded(folder)
    jobs = [lock.parent.name for lock in shared.glob("checkpoints/*/run.lock")]
    places = [f"{place}{job}" for job in jobs for place in ("checkpoints/", "logs/", "work/", "work/.")]
    kept = (path for name in ("code", "envs") for path in (shared / name).glob("*") if _DIGEST.fullmatch(path.name))
    return shared, *(shared / place for place in places), *kept


def folder_is_gone() -> bool:
    """Whether the working directory has been deleted: no relative path means anything there, not even as absolute()."""
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False


def pod_log(shared: Path, job: str, pod: str) -> Path:
    """Where the output of a pod's processes goes."""
    return shared / "logs" / job / "pods" / f"{pod}.log"


def log_tail(log: Path, uid: str | None = None, lines: int = _TAIL_LINES) -> str:
    """The last lines that the pod with this uid, by default the newest one, wrote to the log; empty if there are none.

    Pods of the same name share a log: a later run of the job appends to it.
    """
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _READ_BYTES))
            read = file.read()
    except OSError:
        return ""
    starts = re.escape(uid) if uid else "[^)]*"
    own = re.split(rf"^---- .*\({starts}\) starts\n".encode(), read, flags=re.MULTILINE)[-1]
    tail = b"\n".join(last_states(own.removesuffix(b"\n")).split(b"\n")[-lines:])
    return whole_lines(tail, _TAIL_BYTES).decode(errors="replace")


def newest_snapshot(shared: Path, job: str) -> int | None:
    """The step of the newest snapshot or checkpoint by name, or of the one that is to be restored; whether it verifies
    is for the trainer to find out.
    """
    directory = shared / "checkpoints" / job
    with suppress(OSError, ValueError, OverflowError, LookupError, TypeError):
        return int(json.loads((directory / "restore.json").read_bytes())["step"])
    steps = [_SNAPSHOT.fullmatch(path.name) for path in directory.glob("*-*")]
    return max((int(match[1]) for match in steps if match), default=None)


def has_begun_anew(shared: Path, job: str, uid: str) -> bool:
    """Whether the run with this uid, which begins anew, has set aside what earlier runs of the job have saved; the
    trainer makes the folder at the end of that, also if there was nothing.
    """
    return (shared / "checkpoints" / job / "earlier" / uid).is_dir()


def has_written_files(shared: Path, job: str) -> bool:
    """Whether scripts of this job have left files in their working directory, beside those of its code."""
    work, code = shared / "work" / job, dict[str, list[str]]()
    with suppress(OSError, ValueError, LookupError, TypeError):
        code = dict(json.loads((shared / "work" / f".{job}" / "code.json").read_bytes())["files"])
    for folder, folders, names in os.walk(work):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for file in (Path(folder) / name for name in names):
            if not file.is_symlink() and not _is_of_code(file, code.get(str(file.relative_to(work)), [])):
                return True
    return False


def _is_of_code(file: Path, digests: list[str]) -> bool:
    """Whether it is as the trainer has put it there."""
    try:
        if not digests or not stat.S_ISREG(file.lstat().st_mode):  # to open a named pipe waits for a writer
            return False
        with file.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest() in digests
    except OSError:
        return False


def created_after_others(shared: Path, job: str, now: datetime) -> datetime:
    """The creation time of a run that begins now: later than that of every run before it.

    By this time the trainer knows which of two runs is the newer one and owns the snapshots. A clock that was ahead has
    left a later time than now, a run of the same second the same. Who holds the lock of the job is the newest run.
    """
    try:
        names = [path.name for path in (shared / "checkpoints" / job / "attempts").iterdir()]
    except FileNotFoundError:
        return now
    latest = now
    for match in filter(None, map(_TOKEN.fullmatch, names)):
        with suppress(ValueError, OverflowError, OSError):  # no time
            latest = max(latest, datetime.fromtimestamp(int(match[1]), UTC) + timedelta(seconds=1))
    return latest


@contextmanager
def lock_job(shared: Path, job: str) -> Iterator[int]:
    """Hold the job on this folder. The kernel drops the lock with the process, so that a crash leaves none
    behind, and with the last of those that have inherited the file descriptor which this yields.

    Raises:
        VolumeError: if another `ddpjob run` holds it; the message names its process and machine.
    """
    path = shared / "checkpoints" / job / "run.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise VolumeError(_refusal(error, job, shared, path)) from error
        file.truncate(0)
        json.dump({"pid": os.getpid(), "host": socket.gethostname(), "start": process_start(os.getpid())}, file)
        file.flush()
        try:
            yield file.fileno()
        finally:
            file.truncate(0)


def process_start(pid: int) -> str | None:
    """What tells a process from others that get its number later: the boot of this machine, and when it was started
    since then. None where this cannot be read.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # proc_pid_stat(5): the name in parentheses may hold anything; the start is field 22, and the state after it field 3
    return f"{boot} {stat.rpartition(')')[2].split()[22 - 3]}"


def _refusal(error: OSError, job: str, shared: Path, path: Path) -> str:
    if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
        return f"--shared {shared}: cannot lock {path}: {error.strerror}; choose a folder on a disk that has file locks"
    try:
        holder = json.loads(path.read_text())
        by = f"process {holder['pid']} on {holder['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        by = "another process"
    return f"job {job} is already running in {shared} ({by}); wait for it, stop it, or choose another --shared folder"
