"""The files below a folder of a mounted claim. Links are followed, as `cp -L` does: what they lead to is the data."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from ddp_trainer.contract.exit_codes import UserError

_OF_THE_FILE_SYSTEM = "lost+found"
"""In the root of ext4, and for root alone."""


def mounted_files(root: str, source: str) -> dict[str, int | None]:
    """Sizes by path.

    Raises:
        UserError: something in it is no file, or a link that cannot be followed.
        OSError: a part of it cannot be read; half a data set must not pass for a whole one.
    """
    found: dict[str, int | None] = {}
    folders: list[tuple[str, tuple[str, ...]]] = [(root, (os.path.realpath(root),))]
    while folders:
        folder, around = folders.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                if folder == root and entry.name == _OF_THE_FILE_SYSTEM:
                    continue
                shown = f"{Path(entry.path).relative_to(root)} in {source}"
                what = _followed(entry, shown)
                if stat.S_ISREG(what.st_mode):
                    found[entry.path] = what.st_size
                elif stat.S_ISDIR(what.st_mode):
                    place = os.path.realpath(entry.path)
                    if place in around:
                        raise UserError(f"{shown} is a link to a folder that it is in; remove it")
                    folders.append((entry.path, (*around, place)))
                else:
                    raise UserError(f"{shown} is neither a file nor a folder; remove it")
    return found


def _followed(entry: os.DirEntry[str], shown: str) -> os.stat_result:
    try:
        return entry.stat()
    except OSError as error:
        if entry.is_symlink() and error.errno in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR):
            raise UserError(f"{shown} is a link that leads nowhere in this pod; correct or remove it") from None
        raise
