"""Puts a data set or a model onto the volume before training starts: `python -m ddp_trainer.initialize`.

One run does one initializer of a job (docs/contracts.md section 9). What is fetched goes to a temporary name on the
volume, is checked, synced, and takes its place in one rename, so that no reader sees half of it. A folder that lies
there is moved away first: for a moment a reader sees neither, and a run that is stopped then puts it back, or else the
next one does. A marker then records that this source lies there; another attempt or job with the same initializer finds
the marker and does nothing. Two that run at the same time take turns.

A folder may gain files, but not lose any. A script writes where it likes below the volume, so for it the marker says
that it was done, as long as something lies at its path. What replaces the result of another removes its marker, but not
that of a folder around it where it replaces a result of its own.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path, PurePosixPath
from typing import Any

from ddp_trainer.contract.addresses import public, shown
from ddp_trainer.contract.durable import make_durable
from ddp_trainer.contract.exit_codes import EXIT_FAILED, EXIT_OK, EXIT_PREEMPTED, EXIT_USER, UserError
from ddp_trainer.contract.json_files import read_json, write_json
from ddp_trainer.contract.process_end import end_after_exit_handlers, settle
from ddp_trainer.initialize.sources import CHUNK_BYTES, FetchError, fetch
from ddp_trainer.launch.exit.report import log, report_start_failure
from ddp_trainer.launch.leftovers import sync

MARKERS = ".ddpjob/initialized"
VERSION = 1


class Stopped(BaseException):
    """SIGTERM came."""


@dataclass(frozen=True, slots=True)
class Initializer:
    """One initializer: `source` or `script`, and the path of its result below the volume."""

    name: str
    path: str
    source: str | None = None
    script: str | None = None
    sha256: str | None = None

    @property
    def digest(self) -> str:
        """What it is by content: the same task under another name is the same."""
        what = {"path": self.path, "script": self.script, "sha256": self.sha256, "source": self.source}
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Size:
    """Of a file, or of all files of a folder: what a marker remembers of a result."""

    files: int
    bytes: int


def main(environ: Mapping[str, str] = os.environ) -> int:
    """Do what the environment says.

    Returns:
        0 done, or done before; 64 it can never work as written; 143 stopped by SIGTERM; 1 it may work the next time.
    """
    signal.signal(signal.SIGTERM, _stop)  # the first process of a container has no default for it
    place = environ.get("DDPJOB_TERMINATION_LOG")
    termination_log = Path(place) if place else None
    try:
        task, shared = parse(environ)
        with _turn(shared, task):
            run(task, shared, Path(environ.get("DDPJOB_SOURCES", "/mnt/source")))
    except Stopped:
        return report_start_failure(EXIT_PREEMPTED, "Preempted", "stopped before it was done", None, termination_log)
    except UserError as error:
        return report_start_failure(EXIT_USER, "UserError", shown(str(error)), None, termination_log)
    except FetchError as error:
        return report_start_failure(EXIT_FAILED, "FetchFailed", shown(str(error)), None, termination_log)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        return report_start_failure(
            EXIT_FAILED, "VolumeFailed", f"{error.strerror or error}{where}", None, termination_log
        )
    return EXIT_OK


def parse(environ: Mapping[str, str]) -> tuple[Initializer, Path]:
    """The task and the root of the volume.

    Raises:
        UserError: a variable is missing or says what cannot be.
    """
    try:
        shared = Path(environ["DDPJOB_SHARED"])
        given = json.loads(environ["DDPJOB_INITIALIZER"])
        # an operator that is newer than this image may send more
        task = Initializer(**{field.name: given[field.name] for field in fields(Initializer) if field.name in given})
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"DDPJOB_SHARED and DDPJOB_INITIALIZER say no initializer: {error!r}") from None
    target, root = (Path(os.path.realpath(path)) for path in (shared / task.path, shared))  # a link to itself, too
    if not target.is_relative_to(root) or target == root:
        raise UserError(f"path {task.path!r} leads out of the volume; correct it")
    return task, shared


def run(task: Initializer, shared: Path, pvcs: Path) -> None:
    """Make it so that the result lies at `task.path`, unless it does already.

    Raises:
        UserError, FetchError, OSError: as `ddp_trainer.initialize.sources.fetch`.
    """
    target, marker = shared / task.path, shared / MARKERS / f"{task.digest}.json"
    if task.source is not None:
        _clear(task, target)
    if _is_done(task, target, marker):
        log(f"{task.name}: {task.path} is on the volume already")
        return
    began = time.monotonic()
    target.parent.mkdir(parents=True, exist_ok=True)
    if task.source is not None:
        _fetch(task, shared, target, pvcs)
    else:
        marker.unlink(missing_ok=True)  # of a result that is lost: a script that fails may leave a part of a new one
        _forget_replaced(task, shared, target)
        _run_script(task, shared, target)
    size = measure(target)
    write_json(
        marker,
        {"version": VERSION, "name": task.name, "path": task.path, "files": size.files, "bytes": size.bytes,
         "time": time.time()},
    )  # fmt: skip
    log(f"{task.name}: {task.path} has {size.files} files, {size.bytes} bytes, after {time.monotonic() - began:.1f} s")


def measure(path: Path) -> Size:
    """The files at `path` and their sizes together, without what jobs remove meanwhile."""
    if not path.is_dir():
        return Size(1, path.stat().st_size)
    sizes = []
    for folder, _, names in os.walk(path, onerror=_unless_gone):
        for file in (Path(folder, name) for name in names):
            with suppress(FileNotFoundError):
                if file.is_file():
                    sizes.append(file.stat().st_size)
    return Size(len(sizes), sum(sizes))


def _unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | PermissionError):
        raise error


def _is_done(task: Initializer, target: Path, marker: Path) -> bool:
    """Whether the result is there as it was put there: by its checksum where the task has one, since a pod that
    mounts the volume may have replaced it, else by its size. A script is not measured: others add to what it wrote."""
    known = read_json(marker)
    if known is None or not target.exists():
        return False
    if task.sha256 is not None:
        is_there = target.is_file() and _digest(target) == task.sha256
    else:
        is_there = task.script is not None or holds(measure(target), known, is_folder=target.is_dir())
    if not is_there:
        put = f"{known.get('files')} files, {known.get('bytes')} bytes"
        log(f"{target.name} is not what was put there ({put}): once more")
    return is_there


def holds(found: Size, known: Mapping[str, Any], *, is_folder: bool) -> bool:
    """Whether what a marker knows of is still there, by its size. Jobs add files to a folder, such as an index of it:
    that is no reason to fetch the folder anew, and to delete what they added."""
    files, size = known.get("files"), known.get("bytes")
    if not (isinstance(files, int) and isinstance(size, int)):
        return False
    return (found.files >= files and found.bytes >= size) if is_folder else found == Size(files, size)


def _fetch(task: Initializer, shared: Path, target: Path, pvcs: Path) -> None:
    assert task.source is not None
    log(f"{task.name}: fetching {public(task.source)}")
    part = _hidden(task, target, "part")
    try:
        fetch(task.source, part, pvcs)
        if task.sha256 is not None:
            _verify(part, task)
        sync(part)
        _forget_replaced(task, shared, target)
        _put_in_place(task, part, target)
    finally:
        _remove(part)


def _verify(part: Path, task: Initializer) -> None:
    if part.is_dir():
        raise UserError(f"sha256 is of a single file, and {_what(task)} is a folder; remove it")
    if (digest := _digest(part)) != task.sha256:
        raise FetchError(f"{_what(task)} has the SHA-256 {digest} and not {task.sha256}: it is not used")


def _what(task: Initializer) -> str:
    return task.path if task.source is None else public(task.source)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _run_script(task: Initializer, shared: Path, target: Path) -> None:
    assert task.script is not None
    log(f"{task.name}: running its script")
    hidden = ("DDPJOB_INITIALIZER", "DDPJOB_TERMINATION_LOG")
    environ = {name: value for name, value in os.environ.items() if name not in hidden}
    process = subprocess.Popen(["sh", "-c", task.script], cwd=shared, env=environ, start_new_session=True)
    try:
        code = process.wait()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it left in the background too
    if code != 0:
        raise FetchError(f"the script ended with exit code {code}; its output is in the log of this container")
    if not target.exists():
        raise UserError(f"the script has ended, and there is no {task.path}; correct the script or the path")
    if task.sha256 is not None:
        _verify(target, task)


def _forget_replaced(task: Initializer, shared: Path, target: Path) -> None:
    """Remove the markers of what makes way for the result of `task`: who asks for that again must not get this."""
    read = ((marker, read_json(marker)) for marker in (shared / MARKERS).glob("*.json"))
    markers = {marker: known for marker, known in read if known is not None}
    is_own = any(marker.stem == task.digest or is_earlier(task, known) for marker, known in markers.items())
    is_foreign = os.path.lexists(target) and not is_own
    for marker, known in markers.items():
        if marker.stem != task.digest and replaces(task, known, is_foreign=is_foreign):
            marker.unlink(missing_ok=True)


def is_earlier(task: Initializer, known: Mapping[str, Any]) -> bool:
    """Whether a marker is of `task` before it was edited: the names of a job's initializers are unique."""
    return PurePosixPath(str(known.get("path"))) == PurePosixPath(task.path) and known.get("name") == task.name


def replaces(task: Initializer, known: Mapping[str, Any], *, is_foreign: bool) -> bool:
    """Whether the result that a marker knows of is lost, in part at least, to that of `task`, which makes its own now.

    A source takes the place of all at its path and below. A folder around it loses only what `is_foreign` there: put
    there by something else than `task`, by that folder, say. Scripts add to what others wrote. What a script replaces
    is its own result before it was edited.
    """
    if task.script is not None:
        return is_earlier(task, known)
    path, other = PurePosixPath(task.path), PurePosixPath(str(known.get("path")))
    return other.is_relative_to(path) or (is_foreign and path.is_relative_to(other))


def _put_in_place(task: Initializer, part: Path, target: Path) -> None:
    """What was there, without a marker of ours, makes way: it was asked for to be replaced."""
    _discard(task, target)
    try:
        if os.path.lexists(target) and (target.is_dir() or part.is_dir()):
            target.replace(_aside(target))
        part.replace(target)
    finally:
        _put_back(target)
    make_durable(target.parent.resolve())  # it may be a link within the volume
    _discard(task, target)


def _clear(task: Initializer, target: Path) -> None:
    """What a try that was killed has left."""
    _put_back(target)
    _discard(task, target)
    _remove(_hidden(task, target, "part"))


def _hidden(task: Initializer, target: Path, what: str) -> Path:
    """A name that only `task` uses: a try of it, under its lock."""
    return target.with_name(f".{target.name}.{task.digest[:12]}.{what}")


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}.old")


def _put_back(target: Path) -> None:
    """What was moved away for something that then did not take its place. It is whole: see `_discard`."""
    if os.path.lexists(_aside(target)) and not os.path.lexists(target):
        _aside(target).replace(target)


def _discard(task: Initializer, target: Path) -> None:
    """Remove what was moved away, under another name: a run that is killed meanwhile leaves a part of it."""
    gone = _hidden(task, target, "gone")
    _remove(gone)
    with suppress(FileNotFoundError):
        _aside(target).replace(gone)
    _remove(gone)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def _turn(shared: Path, task: Initializer) -> Iterator[None]:
    """One at a time for each task, over all jobs on the volume; on a volume without locks there is no waiting."""
    folder = shared / MARKERS
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{task.digest}.lock").open("w") as lock:
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log(f"{task.name}: waiting for another pod, which prepares {task.path} now")
                fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            log(f"the volume has no locks ({error.strerror}); two jobs that fetch the same must not start together")
        yield


def _stop(*_: Any) -> None:
    raise Stopped


if __name__ == "__main__":
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(
            "usage: python -m ddp_trainer.initialize\n\nRun one initializer of a DDPJob. The environment describes it."
        )
        sys.exit(EXIT_OK)
    end_after_exit_handlers()
    sys.exit(settle(main()))
