"""Removal of submitted code and packages that no job uses any more: `code/<digest>`, `envs/<key>`.

A job uses what the records in `work/.<job>` name. What no record names is kept for KEEP_DAYS after a launcher began or
ceased to use it, which is the modification time of its folder.

There is no lock, which could outlive its holder. A launcher sets that time first, and then looks whether the folder is
there; a removal renames the folder first, and then looks at its time. So either the launcher finds no folder and makes
it again, or the removal sees that it is used and gives it its name back.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from pathlib import Path
from typing import Final

from ddp_trainer.launch.exit.report import log
from ddp_trainer.launch.leftovers import beside, put_in_place, remove

KEEP_DAYS: Final = 30
CODE: Final = "code.json"
PACKAGES: Final = "packages.json"
ENVIRONMENT: Final = "environment"
"""A link to the Python environment with the packages."""
_RECORDS: Final = {CODE: "sha256", PACKAGES: "key"}
"""Files in `work/.<job>`, and the field that names what the job uses."""
_NAME: Final = re.compile(r"[0-9a-f]{64}|[0-9a-f]{32}")
"""Of a digest or a key. Anything else there is not ours."""


def mark_used(path: Path) -> None:
    """To be called before looking whether `path` is there, and when it is not used any more."""
    if not _NAME.fullmatch(path.name):  # of a record that somebody else has written
        return
    with contextlib.suppress(OSError):  # it is not there, or belongs to somebody else
        os.utime(path)
        os.utime(path.parent)  # an NFS client forgets what it knows of the names in there


def remove_unused_aside(shared: Path) -> None:
    """`remove_unused` in a thread: a folder of many files takes its time, and nothing waits for it."""
    threading.Thread(target=remove_unused, args=(shared, time.time()), name="remove-unused", daemon=True).start()


def remove_unused(shared: Path, now: float) -> None:
    """Remove what no job uses. `now` in epoch seconds. What fails is logged: it only costs space."""
    try:
        used = _used(shared / "work")
        for folder in (shared / "code", shared / "envs"):
            for path in folder.iterdir() if folder.is_dir() else ():
                if _NAME.fullmatch(path.name) and path.name not in used and _is_old(path, now):
                    _remove(path, now)
    except OSError as error:
        log(f"unused code and packages are not removed: {error}")


def _used(work: Path) -> set[str]:
    """What the records name. Raises OSError where one cannot be read."""
    used: set[str] = set()
    with contextlib.suppress(OSError):
        os.utime(work)  # as in mark_used
    for folder in work.iterdir() if work.is_dir() else ():
        for name, field in _RECORDS.items() if folder.name.startswith(".") else ():
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError, LookupError, TypeError):
                used.add(str(json.loads((folder / name).read_bytes())[field]))
    return used


def _is_old(path: Path, now: float) -> bool:
    try:
        return now - path.lstat().st_mtime > KEEP_DAYS * 24 * 3600
    except FileNotFoundError:
        return False  # another pod was faster


def _remove(path: Path, now: float) -> None:
    gone = beside(path)
    try:
        path.rename(gone)
    except FileNotFoundError:
        return
    if not _is_old(gone, now):
        put_in_place(gone, path, lambda: True)
    else:
        log(f"{path.parent.name}/{path.name[:12]} is removed: no job has used it for {KEEP_DAYS} days")
    remove(gone)
