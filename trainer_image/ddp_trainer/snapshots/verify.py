"""Reading a snapshot's files and believing none of them before its size and SHA-256 are those of the manifest."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ddp_trainer.snapshots.errors import CorruptSnapshotError
from ddp_trainer.snapshots.manifest import FileEntry, Manifest

_BLOCK = 4 << 20


def verify_files(directory: Path, manifest: Manifest) -> None:
    """Read every file of a snapshot. Raises CorruptSnapshotError naming the first file that is not as it should be.

    Any other OSError (EIO, ESTALE) goes through: the disk, not the snapshot, may be what is ill.
    """
    block = memoryview(bytearray(_BLOCK))
    for name, entry in manifest.files.items():
        with _opened(directory, name, entry) as descriptor:
            digest = hashlib.sha256()
            while count := os.readv(descriptor, [block]):
                digest.update(block[:count])
        _compare(name, entry, digest.hexdigest())


def read_verified(directory: Path, name: str, entry: FileEntry) -> bytearray:
    """The bytes of one file, summed as they were read: what is returned is what was verified. Raises as
    `verify_files` does.
    """
    data = bytearray(entry.bytes)
    view = memoryview(data)
    digest = hashlib.sha256()
    position = 0
    with _opened(directory, name, entry) as descriptor:
        while position < entry.bytes and (count := os.readv(descriptor, [view[position : position + _BLOCK]])):
            digest.update(view[position : position + count])
            position += count
    if position != entry.bytes:
        raise CorruptSnapshotError(f"{name} ended after {position} of {entry.bytes} bytes")
    _compare(name, entry, digest.hexdigest())
    return data


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
