"""The file operations that a snapshot is made of, one method each.

They are few and named so that a test can count them and kill the process at any one, and so that what is durable when
is visible in one place: nothing counts as written before `sync` of the file, nothing as named before `fsync` of its
directory.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from ddp_trainer.contract.durable import make_durable
from ddp_trainer.snapshots.trust.manifest import FileEntry

Chunk = bytes | bytearray | memoryview

UNKNOWN_BYTES: Final = sys.maxsize
"""Free on a file system without a size, as one on FUSE may be: its writes say when it is full."""


class Disk:
    """The real file system. Every method raises OSError as the system call does."""

    def make_directory(self, path: Path) -> None:
        """Create a directory; it must not exist."""
        path.mkdir()

    def create(self, path: Path, chunks: Iterable[Chunk]) -> FileEntry:
        """Write a new file that outlives a power cut; returns what it was given to write, summed on the way.

        An existing file or a symbolic link of that name is an error, never written through.
        """
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        size, digest = 0, hashlib.sha256()
        try:
            for chunk in chunks:
                view = memoryview(chunk).cast("B")
                digest.update(view)
                size += len(view)
                while view:
                    view = view[self.write(descriptor, view) :]
            # Before it is closed: a client of NFS or CephFS may send the bytes only now. One that is opened later does
            # not hear of an error before it, once the kernel has forgotten the file in between.
            self.sync(descriptor)
        finally:
            os.close(descriptor)
        return FileEntry(size, digest.hexdigest())

    def write(self, descriptor: int, view: memoryview) -> int:
        """Write at most `view`; returns the bytes written. Linux writes 2 GiB less a page at most in one call."""
        return os.write(descriptor, view)

    def sync(self, descriptor: int) -> None:
        """Make the bytes of an open file outlive a power cut. Raises what went wrong since it was opened."""
        os.fsync(descriptor)

    def fsync(self, path: Path) -> None:
        """Make a directory's names, or the bytes of a file that was written before, outlive a power cut."""
        make_durable(path)

    def rename(self, source: Path, target: Path) -> None:
        """Give a directory its name at once. One that is not empty is never replaced (ENOTEMPTY or EEXIST)."""
        source.rename(target)

    def remove_tree(self, path: Path) -> None:
        """Delete a directory and all in it, or only the link if it is a symbolic link.

        What cannot be deleted keeps nothing else from it: one folder that is held would keep gigabytes behind it.
        Raises the first error at the end.
        """
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
            return
        errors: list[BaseException] = []
        if sys.version_info >= (3, 12):
            shutil.rmtree(path, onexc=lambda _, __, error: errors.append(error))
        else:
            shutil.rmtree(path, onerror=lambda _, __, info: errors.append(info[1]))
        if errors:
            raise errors[0]

    def free_bytes(self, path: Path) -> int:
        """Bytes an ordinary process may still write to the file system of `path`; it may be UNKNOWN_BYTES."""
        usage = os.statvfs(path)
        if usage.f_blocks == 0:
            return UNKNOWN_BYTES
        return usage.f_bavail * usage.f_frsize

    def free_inodes(self, path: Path) -> int | None:
        """How many more files it takes; None where its number of files has no limit of its own, as on btrfs."""
        usage = os.statvfs(path)
        return usage.f_favail if usage.f_files else None


_LOOK_BYTES = 1 << 20


def is_cached(path: Path) -> bool:
    """Whether the end of a file is in this node's memory (mincore(2)), as it is after this node has written it.

    A hint: on a network file system such a node can sum the file without reading it back. False where it cannot be
    found out.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            begin = max(0, size - _LOOK_BYTES) // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
            with mmap.mmap(file.fileno(), size - begin, access=mmap.ACCESS_COPY, offset=begin) as pages:
                return _are_resident(pages)
    except (OSError, ValueError):  # ValueError: an empty file
        return False


def _are_resident(pages: mmap.mmap) -> bool:
    resident = (ctypes.c_ubyte * -(-len(pages) // mmap.PAGESIZE))()
    first = ctypes.c_char.from_buffer(pages)
    try:
        mincore = ctypes.CDLL(None, use_errno=True).mincore
        failed = mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(pages)), resident)
    finally:
        del first  # or the mapping cannot be closed
    return not failed and all(page & 1 for page in resident)
