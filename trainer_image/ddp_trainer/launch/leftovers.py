"""Names for what is made on the volume beside its place, synced and renamed, and the removal of what never was.

Such names begin with a dot. A process that is killed leaves its own behind, and no other can know whether it lives.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from ddp_trainer.contract.durable import make_durable

LEFTOVER_SECONDS: Final = 24 * 3600.0
_SYNCS: Final = 16
"""At a time: each waits for the volume's server, and an environment has thousands of files."""


def beside(path: Path) -> Path:
    """A path in the folder of `path` that no other process has: in pods, all launchers have the same pid."""
    return path.with_name(f".{path.name[:32]}-{os.urandom(8).hex()}")


def remove(path: Path) -> None:
    """Whatever it is, as far as possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def remove_leftovers(folder: Path, now: float) -> None:
    """Remove what is too old to be still in the making. `now` in epoch seconds."""
    for path in folder.glob(".*"):
        try:
            old = now - path.lstat().st_mtime > LEFTOVER_SECONDS
        except FileNotFoundError:
            continue  # another pod was faster
        if old:
            remove(path)


def sync(path: Path) -> None:
    """Make a file, or a folder with all below it, outlive a power cut: to be called before it gets its name. What links
    lead to is not part of it. Raises OSError.
    """
    files, folders = [path], list[Path]()
    if path.is_dir():
        files = []
        for folder, _, names in os.walk(path, onerror=_raise):
            folders.append(Path(folder))
            files += [Path(folder, name) for name in names]
    with ThreadPoolExecutor(_SYNCS) as pool:
        for group in (files, folders):
            for _ in pool.map(_sync_one, group):
                pass


def _raise(error: OSError) -> None:
    raise error


def _sync_one(path: Path) -> None:
    if not path.is_symlink() and (path.is_file() or path.is_dir()):
        make_durable(path)


def put_in_place(part: Path, path: Path, is_whole: Callable[[], bool]) -> None:
    """Rename the folder `part` to `path`, unless another pod has put the same there, which `is_whole` says."""
    while True:
        try:
            part.rename(path)
            return
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
        if is_whole():
            return
        damaged = beside(path)
        try:
            path.rename(damaged)
        except FileNotFoundError:
            continue  # another pod was faster
        remove(damaged)
