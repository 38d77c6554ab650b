"""Beginning anew: what earlier jobs of the same name saved is set aside, so that this one does not resume from it.

    checkpoints/<job>/earlier/<uid of the job that set it aside>/step-000000000600
    checkpoints/<job>/earlier/.tmp-<uid>                             the same, while not all is moved

Restarts of the job find nothing but its own. What the job before set aside is removed then: one run back is kept.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, get_args

from ddp_trainer.snapshots.trust.disk import Disk
from ddp_trainer.snapshots.trust.errors import SnapshotError
from ddp_trainer.snapshots.trust.fence import Fence
from ddp_trainer.snapshots.trust.listing import manifest_in, steps_in
from ddp_trainer.snapshots.trust.names import TEMPORARY, Series, step_directory

log = logging.getLogger(__name__)

FOLDER: Final = "earlier"


def set_aside(directory: Path, fence: Fence, disk: Disk | None = None) -> None:
    """Move the snapshots and checkpoints of other jobs to `earlier/`. Raises FencedError, OSError.

    Until all are moved, this job has saved nothing: what cannot be read is another's then, and moved too, or this job
    would resume from it once it can be read. Carried out again after a crash in the middle of it, it moves the rest in
    the same way. The folder gets its name at the end of that. From then on, what cannot be read is this job's own and
    stays: the store sets it aside as corrupt, or passes over it for as long as it cannot be read (EIO).
    """
    disk = disk or Disk()
    aside = directory / FOLDER / fence.own.uid
    unfinished = aside.with_name(f"{TEMPORARY}{aside.name}")
    is_finished = _has(aside.parent, aside.name)
    others = list(_of_others(directory, fence.own.uid, unreadable=not is_finished))
    if is_finished and not others:
        return
    fence.check()
    folder = aside if is_finished else unfinished
    for made in (aside.parent, folder):
        with contextlib.suppress(FileExistsError):
            disk.make_directory(made)
    for path in others:
        disk.rename(path, _free(folder, path.name))
    disk.fsync(folder)
    disk.fsync(directory)
    if any(folder.iterdir()):
        fence.check()
        for older in aside.parent.iterdir():
            if older not in (aside, unfinished):
                _discard(older, disk)
    if not is_finished:
        disk.rename(unfinished, aside)
        disk.fsync(aside.parent)
    if others:
        log.warning("this job begins anew: snapshots of an earlier one (%d) are now in %s", len(others), aside)


def _discard(older: Path, disk: Disk) -> None:
    """Delete what another job had set aside. A client of NFS keeps a folder in which something is open: that stays for
    the next job that begins anew.
    """
    try:
        disk.remove_tree(older)
    except OSError as error:
        log.warning("%s is not deleted yet: %s", older, error)


def _of_others(directory: Path, uid: str, *, unreadable: bool) -> Iterator[Path]:
    for series in get_args(Series):
        for step in steps_in(directory, series):
            path = directory / step_directory(step, series)
            try:
                is_other = manifest_in(path).uid != uid
            except (SnapshotError, OSError):
                is_other = unreadable
            if is_other:
                yield path


def _has(folder: Path, name: str) -> bool:
    """By listing it: a client of NFS remembers for up to a minute that a name does not exist."""
    try:
        return any(path.name == name for path in folder.iterdir())
    except FileNotFoundError:
        return False


def _free(folder: Path, name: str) -> Path:
    """The name, or with a number where a snapshot of this step is there already."""
    numbered = (folder / f"{name}.{number}" for number in itertools.count(1))
    return next(path for path in itertools.chain([folder / name], numbered) if not os.path.lexists(path))
