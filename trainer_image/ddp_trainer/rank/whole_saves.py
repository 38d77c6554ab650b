"""What a script writes with `torch.save`, or a library for it, is whole, also where the rank ends meanwhile.

Many scripts write their checkpoint over the last one, in place. A rank that is killed meanwhile (out of memory, with
its node, 2 s after SIGTERM where the whole gang restarts) would leave a file cut short, and no later attempt could load
it. `torch.save` to a path writes beside it therefore, and renames: the path has the old file or the new one.

Ultralytics saves into memory, and writes that to its place by `Path.write_bytes`, which does the same for a zip file.
Composer opens the file itself: its own function is called for a file beside. It refuses to resume where there is a part
of a later checkpoint than the one that it resumes from.

Lightning writes by a transaction of fsspec, into the folder for temporary files. In a pod that is another file system
than the volume: the file was copied to its place, and is copied beside it now.

What is written has the name that it will have, and a script that looks for checkpoints in all folders would take what a
killed rank has left for one. So a rank notes each folder that it saves into, and before its script every rank removes
what earlier attempts have left in theirs: those of later ones still save where it begins late.

SIGTERM waits for the end of a save on the main thread, for as long as the process is given: `shutdownSeconds` where the
pod is asked to stop, 10 s after a failure of another rank of the pod, and 2 s where the whole gang restarts.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import glob
import json
import os
import re
import secrets
import shutil
import signal
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ddp_trainer.contract.json_files import FULL
from ddp_trainer.rank.after_import import after_import, after_import_in_all_processes
from ddp_trainer.rank.dynamo import TRACE_RULES, keep_out_of_graphs

SERIALIZATION: Final = "torch.serialization"
FSSPEC: Final = "fsspec.implementations.local"
COMPOSER: Final = "composer.utils.checkpoint"
ROOM: Final = 1.1
"""Free space needed beside an old file, as a multiple of its size."""
MEMORY: Final = Path("/dev/shm")  # noqa: S108
"""Files there count as memory of the pod: two of them may end it, and none outlasts it."""
_SAVING: Final = ".ddpjob-saving-"
_ZIP: Final = b"PK\x03\x04"
"""With which a file of `torch.save` begins."""
_PROBE_BYTES: Final = 1 << 20
_NOTE: Final = re.compile(r"(?P<uid>.+)-(?P<attempt>[0-9]+)-[^-]+\.jsonl")
_MOST_NOTED: Final = 256
"""Folders of a process, of which the newest count: every rank looks into all of them before its script."""
_NOTE_SECONDS: Final = 7 * 24 * 3600.0
"""How long a note stays of folders that cannot be seen here, such as those of a pod that may go on."""


@dataclass(frozen=True)
class _Saver:
    """A rank, for all processes of it that save."""

    owner: str
    """The job and the rank, for what a killed one has left."""
    token: str
    """Of this process, and of those that it starts: what they write now is not left."""
    files: int
    notes: Path | None
    """A file: the folders that it has saved into, one a line."""

    @property
    def owners(self) -> str:
        return f"{_SAVING}{self.owner}-"

    @property
    def prefix(self) -> str:
        """Of the names of its folders."""
        return f"{self.owners}{self.token}"


def save_whole_files(owner: str, files: int = 1, notes: Path | None = None, attempt: str = "") -> None:
    """From now on, in a rank and in all processes that it starts; call it before the script. `owner` is the job and its
    rank. So many `files` may be written at a time: where another rank than 0 saves, all do. `notes` is a folder that
    all attempts see, `attempt` a name that no other one has.
    """
    token = secrets.token_hex(4)
    saver = _Saver(owner, token, files, notes / f"{attempt}-{token}.jsonl" if notes is not None else None)
    if notes is not None:
        _remove_left(notes, attempt)
    after_import_in_all_processes(SERIALIZATION, functools.partial(_install, saver))
    after_import(FSSPEC, functools.partial(_install_in_fsspec, saver))
    after_import(COMPOSER, functools.partial(_install_in_composer, saver))


def _remove_left(notes: Path, attempt: str) -> None:
    """Remove what ranks of earlier attempts were writing when they ended. Every rank does: so no script sees it."""
    try:
        earlier = sorted(note for note in notes.glob("*.jsonl") if _is_earlier(note.name, attempt))
        device = notes.stat().st_dev
    except OSError:
        return
    for note in earlier:
        with contextlib.suppress(OSError):
            is_old = time.time() - note.stat().st_mtime > _NOTE_SECONDS
            lines = note.read_text().splitlines()[-_MOST_NOTED:]
            are_clear = [_is_clear(line, device) for line in lines]
            if is_old or all(are_clear):
                note.unlink()  # which the first of the ranks can


def _is_earlier(note: str, attempt: str) -> bool:
    """Of two runs of a job, the name does not say which one is earlier: there is one at a time."""
    uid, _, number = attempt.rpartition("-")
    match = _NOTE.fullmatch(note)
    if match is None or match["uid"] != uid or not number.isdecimal():
        return not note.startswith(f"{attempt}-")
    return int(match["attempt"]) < int(number)


def _is_clear(line: str, device: int) -> bool:
    """Remove what a line of a note names, and whether nothing of it is left, as far as can be seen here. A folder may
    be of one pod alone; one that would be on the `device` of the notes, which all pods have, is gone.
    """
    try:
        noted = json.loads(line)
        folder, prefix = Path(noted["folder"]), str(noted["prefix"])
    except (ValueError, LookupError, TypeError):  # it was cut short
        return True
    try:
        _remove_folders(folder, prefix)
        if folder.is_dir():
            return not _folders(folder, prefix)
        there = next(parent for parent in folder.parents if parent.exists())
        return there.stat().st_dev == device
    except (OSError, StopIteration):
        return False


def _remove_folders(folder: Path, prefix: str, but: str | None = None) -> None:
    """Remove those of one process, or those of all processes of a rank `but` one."""
    for left in _folders(folder, prefix, 16 if but is not None else 8):
        if but is None or not left.name.startswith(but):
            shutil.rmtree(left, ignore_errors=True)


def _folders(folder: Path, prefix: str, more: int = 8) -> list[Path]:
    """Those with a name of this beginning, and so many characters `more`."""
    if not prefix.startswith(_SAVING) or "/" in prefix:
        return []
    return list(folder.glob(f"{glob.escape(prefix)}{'[!-]' * more}"))


def _install(saver: _Saver) -> None:
    """Once in a process: one that is forked has it."""
    save = sys.modules[SERIALIZATION].save
    if getattr(save, "is_whole", False):
        return
    beside = _Beside(saver)
    with contextlib.suppress(OSError):
        # before the script looks there for its newest folder, as examples of accelerate do
        beside.clear(Path.cwd())

    @functools.wraps(save)
    def whole(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        with _sigterm_afterwards():
            path = _replaceable(f, saver.files)
            if path is None or not beside.write(path, Path(f).name, lambda file: save(obj, file, *args, **kwargs)):
                save(obj, f, *args, **kwargs)

    write_bytes, local = Path.write_bytes, type(Path())

    @functools.wraps(write_bytes)
    def whole_bytes(path: Path, data: Any) -> int:
        view = memoryview(data)
        # a class of another library, such as S3Path, opens files in its own way
        is_plain = type(path) is local and view.nbytes and view.c_contiguous
        if not is_plain or bytes(view.cast("B")[:4]) != _ZIP:
            return write_bytes(path, data)
        with _sigterm_afterwards():
            place = _replaceable(path, saver.files)
            if place is None or not beside.write(place, path.name, lambda file: write_bytes(Path(file), data)):
                return write_bytes(path, data)
        return view.nbytes

    Path.write_bytes = whole_bytes  # type: ignore[assignment, method-assign]
    whole.is_whole = True  # type: ignore[attr-defined]
    # `torch` takes the name over while it is imported, which is done where torch was there before
    for name in (SERIALIZATION, "torch"):
        if hasattr(sys.modules[name], save.__name__):
            setattr(sys.modules[name], save.__name__, whole)
    # torch.compile leaves this package alone, as it does with torch's own `save`
    after_import(TRACE_RULES, functools.partial(keep_out_of_graphs, __package__))


def _install_in_fsspec(saver: _Saver) -> None:
    # what the library has inside may change
    opener: Any = getattr(sys.modules[FSSPEC], "LocalFileOpener", None)
    commit = getattr(opener, "commit", None)
    if commit is None:
        return
    beside = _Beside(saver)

    @functools.wraps(commit)
    def whole(file: Any) -> None:
        temporary = getattr(file, "temp", None)
        with _sigterm_afterwards():
            if temporary is None or not _copied_whole(beside, Path(temporary), file, saver.files):
                commit(file)

    opener.commit = whole


def _install_in_composer(saver: _Saver) -> None:
    module: Any = sys.modules[COMPOSER]
    write = getattr(module, "_write_checkpoint_file", None)
    if write is None:
        return
    beside = _Beside(saver)

    @functools.wraps(write)
    def whole(state_dict: object, filename: Any) -> None:
        with _sigterm_afterwards():
            path = _replaceable(filename, saver.files)
            # it compresses by the end of the name
            if path is None or not beside.write(path, Path(filename).name, lambda file: write(state_dict, file)):
                write(state_dict, filename)

    module._write_checkpoint_file = whole


def _copied_whole(beside: _Beside, temporary: Path, file: Any, files: int) -> bool:
    """Whether the end of a transaction is done: not where a rename does it."""
    path = _replaceable(file.path, files)
    if path is None or temporary.stat().st_dev == path.parent.stat().st_dev:
        return False
    file.f.close()
    if not beside.write(path, path.name, lambda place: shutil.copyfile(temporary, place)):
        return False
    temporary.unlink()
    return True


@contextlib.contextmanager
def _sigterm_afterwards() -> Iterator[None]:
    """Only on the main thread: Python sets handlers of signals on that one alone."""
    handler = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or handler in (None, signal.SIG_IGN):
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
        for number in came[:1]:
            signal.raise_signal(number)


class _Beside:
    """Files written in a hidden folder beside their place, under their own name, which torch writes into them too."""

    def __init__(self, saver: _Saver) -> None:
        self._saver = saver
        self._noted: set[Path] = set()
        self._cleared: set[Path] = set()
        self._in_place: set[Path] = set()

    def write(self, path: Path, name: str, save: Callable[[str], object]) -> bool:
        """Whether `path` has been replaced by what `save` writes; where that cannot be done here, nothing was changed.

        Raises what `save` raises, and FileNotFoundError where a later attempt has taken the place of this one.
        """
        if path.parent in self._in_place:
            return False
        try:
            self.clear(path.parent)
            self._note(path.parent)
            folder = Path(tempfile.mkdtemp(prefix=self._saver.prefix, dir=path.parent))
        except OSError:
            return False
        try:
            if not _has_owner_of(path, folder):
                return False
            temporary = folder / name
            try:
                save(str(temporary))
            except Exception:
                if path.exists() and _is_full(folder):
                    return False  # the old one makes way
                raise
            if path.exists() and not _is_on_disk(temporary):
                return False
            try:
                _copy_mode(path, temporary)
                temporary.replace(path)
            except FileNotFoundError:
                raise
            except OSError:  # mounted by itself, or on a file system without rename or modes
                self._in_place.add(path.parent)
                return False
            return True
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def clear(self, folder: Path) -> None:
        """Remove what this rank has left where it was killed: not what a thread of it, or a process that it has
        started, writes now.
        """
        if folder in self._cleared:
            return
        self._cleared.add(folder)
        _remove_folders(folder, self._saver.owners, but=self._saver.prefix)

    def _note(self, folder: Path) -> None:
        if self._saver.notes is None or folder in self._noted:
            return
        self._noted.add(folder)
        with contextlib.suppress(OSError):  # the save itself may be to another volume
            self._saver.notes.parent.mkdir(parents=True, exist_ok=True)
            with self._saver.notes.open("a") as file:
                file.write(json.dumps({"folder": str(folder), "prefix": self._saver.prefix}) + "\n")
            if len(self._noted) % _MOST_NOTED == 0:
                _shorten(self._saver.notes)


def _shorten(note: Path) -> None:
    """Some scripts make a folder for each checkpoint. What another process of the rank notes meanwhile may be lost."""
    new = note.with_name(f".{note.name}.{os.getpid()}-{threading.get_ident()}")
    new.write_text("".join(f"{line}\n" for line in note.read_text().splitlines()[-_MOST_NOTED:]))
    new.replace(note)


def _has_owner_of(path: Path, folder: Path) -> bool:
    """Whether what is made here has the owner and the group of the file at `path`, if there is one. They need not be
    those of this process: the group may be the folder's, and a volume may give all files to one user.
    """
    try:
        old, new = path.stat(), folder.stat()
    except FileNotFoundError:
        return True
    return (old.st_uid, old.st_gid) == (new.st_uid, new.st_gid)


def _copy_mode(path: Path, new: Path) -> None:
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        return
    if stat.S_IMODE(new.stat().st_mode) != mode:  # some file systems refuse to set what a file has
        new.chmod(mode)


def _is_on_disk(file: Path) -> bool:
    """Wait until the file outlasts its node, which may have the new name before the bytes; False if they do not fit."""
    try:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno == errno.EIO:
            raise
        return error.errno not in FULL  # some file systems refuse to sync
    return True


def _is_full(folder: Path) -> bool:
    """Whether nothing more can be written there. What torch raises then does not say so."""
    try:
        with (folder / "probe").open("wb") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.errno in FULL
    return False


def _replaceable(f: Any, files: int) -> Path | None:
    """The regular file, there or to come, that `f` names and that another one may take the place of, if so many `files`
    of its size are written at the same time.
    """
    if not isinstance(f, str | os.PathLike) or not isinstance(name := os.fspath(f), str) or name.endswith(os.sep):
        return None
    path = Path(os.path.realpath(name))
    if path.is_relative_to(MEMORY):
        return None
    try:
        old = Path(name).stat()
    except FileNotFoundError:
        return path
    except OSError:
        return None
    if _is_open_here(old):
        return None
    # other names of the file would see a difference; without room for both, the old one makes way
    is_plain = stat.S_ISREG(old.st_mode) and old.st_nlink == 1 and os.access(path, os.W_OK)
    return path if is_plain and _has_room(path.parent, old.st_size * files) else None


def _has_room(folder: Path, size: int) -> bool:
    """Also where the file system does not say how large it is."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return True
    return usage.total == 0 or usage.free > size * ROOM


def _is_open_here(file: os.stat_result) -> bool:
    """Whether this process has the file open, as a NamedTemporaryFile that is uploaded next: it would go on with the
    old one. A path below `/proc/self/fd` names such a file too.
    """
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(int(descriptor.name)), file):
                return True
    return False
