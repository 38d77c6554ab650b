"""The files of a snapshot: summed where others wrote them, and none accepted before its size and SHA-256 are those of
the manifest.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from queue import SimpleQueue

from ddp_trainer.snapshots.trust.disk import Disk
from ddp_trainer.snapshots.trust.errors import CorruptSnapshotError, SnapshotError
from ddp_trainer.snapshots.trust.manifest import FileEntry, Manifest

_BLOCK = 4 << 20


def files_in(directory: Path) -> Sequence[str]:
    """Names of all files below `directory`, in order. Raises SnapshotError for a link or a special file."""
    names = []
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            raise SnapshotError(f"{name} is a link or no plain file, which cannot be verified: write the file itself")
        if path.is_file():
            names.append(name)
    return names


def sums(directory: Path, names: Iterable[str], disk: Disk) -> dict[str, FileEntry]:
    """Sum and sync the files of these names below `directory`, which others wrote and closed. Raises OSError."""
    entries = {}
    for name in names:
        with (directory / name).open("rb") as file:
            entries[name] = read_back(file)
            disk.sync(file.fileno())  # of what was opened before it was read: an error in between is not missed
    return entries


def read_back(file: BufferedReader) -> FileEntry:
    """What is in an open file. Raises OSError."""
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileEntry(os.fstat(file.fileno()).st_size, digest)


def verify_files(directory: Path, manifest: Manifest, on_read: Callable[[], None] = lambda: None) -> None:
    """Read every file of a snapshot; calls `on_read` after each block.

    Raises CorruptSnapshotError naming the first file that is not as it should be.
    Any other OSError (EIO, ESTALE) goes through: the disk, not the snapshot, may be what is ill.
    """
    block = memoryview(bytearray(_BLOCK))
    for name, entry in manifest.files.items():
        with _opened(directory, name, entry) as descriptor:
            digest = hashlib.sha256()
            while count := os.readv(descriptor, [block]):
                digest.update(block[:count])
                on_read()
        _compare(name, entry, digest.hexdigest())


def read_verified(directory: Path, name: str, entry: FileEntry) -> bytearray:
    """The bytes of one file. Raises as `verify_files` does."""
    data = bytearray(entry.bytes)
    read_verified_into(directory, name, entry, [memoryview(data)] if data else [])
    return data


def read_verified_into(directory: Path, name: str, entry: FileEntry, pieces: Iterable[memoryview]) -> None:
    """Read one file once into `pieces`, which together have its size; what lies there is what was summed.

    Each piece is asked for when the one before is filled. Another thread sums what is there already: both the system
    call and the sum release the interpreter's lock. Raises as `verify_files` does.
    """
    filled: SimpleQueue[list[memoryview] | None] = SimpleQueue()
    digest = hashlib.sha256()

    def add_up() -> None:
        while (blocks := filled.get()) is not None:
            for block in blocks:
                digest.update(block)

    adding = threading.Thread(target=add_up, name=f"sum-{name}")
    adding.start()
    try:
        with _opened(directory, name, entry) as descriptor:
            _fill(descriptor, name, entry, pieces, filled)
    finally:
        filled.put(None)
        adding.join()
    _compare(name, entry, digest.hexdigest())


def _fill(
    descriptor: int,
    name: str,
    entry: FileEntry,
    pieces: Iterable[memoryview],
    filled: SimpleQueue[list[memoryview] | None],
) -> None:
    blocks: list[memoryview] = []
    held = position = 0
    for piece in pieces:
        while piece:
            count = os.readv(descriptor, [piece[:_BLOCK]])
            if not count:
                raise CorruptSnapshotError(f"{name} ended after {position} of {entry.bytes} bytes")
            blocks.append(piece[:count])
            piece = piece[count:]
            position += count
            held += count
            # Small tensors are handed over together: waking the other thread costs more than summing one.
            if held >= _BLOCK:
                filled.put(blocks)
                blocks, held = [], 0
    filled.put(blocks)


@contextmanager
def _opened(directory: Path, name: str, entry: FileEntry) -> Iterator[int]:
    path = directory / name
    if not path.parent.resolve().is_relative_to(directory.resolve()):
        raise CorruptSnapshotError(f"{name} leads out of the snapshot")
    try:
        # O_NONBLOCK: a named pipe in the file's place must not hang the reader.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            raise CorruptSnapshotError(f"{name} is missing") from error
        if path.is_symlink():
            raise CorruptSnapshotError(f"{name} is a symbolic link") from error
        raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise CorruptSnapshotError(f"{name} is not a regular file")
        if found.st_size != entry.bytes:
            raise CorruptSnapshotError(f"{name} has {found.st_size} bytes, its manifest says {entry.bytes}")
        yield descriptor
    finally:
        os.close(descriptor)


def _compare(name: str, entry: FileEntry, digest: str) -> None:
    if digest != entry.sha256:
        raise CorruptSnapshotError(f"{name} has SHA-256 {digest[:12]}…, its manifest says {entry.sha256[:12]}…")
