"""Beginning anew: what earlier jobs of the same name saved is set aside, so that this one does not resume from it.

    checkpoints/<job>/earlier/<uid of the job that set it aside>/step-000000000600

Restarts of the job find nothing but its own. What the job before set aside is removed then: one run back is kept.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Final, get_args

from ddp_trainer.snapshots.trust.disk import Disk
from ddp_trainer.snapshots.trust.errors import SnapshotError
from ddp_trainer.snapshots.trust.fence import Fence
from ddp_trainer.snapshots.trust.listing import manifest_in, steps_in
from ddp_trainer.snapshots.trust.names import Series, step_directory

log = logging.getLogger(__name__)

FOLDER: Final = "earlier"


def set_aside(directory: Path, fence: Fence, disk: Disk | None = None) -> None:
    """Move the snapshots and checkpoints of other jobs to `earlier/`. Raises FencedError, OSError.

    Carried out again after a crash in the middle of it, it moves the rest.
    """
    disk = disk or Disk()
    others = list(_of_others(directory, fence.own.uid))
    if not others:
        return
    fence.check()
    aside = directory / FOLDER / fence.own.uid
    for folder in (aside.parent, aside):
        with contextlib.suppress(FileExistsError):
            disk.make_directory(folder)
    log.warning("this job begins anew: snapshots of an earlier one (%d) are now in %s", len(others), aside)
    for path in others:
        disk.rename(path, aside / path.name)
    disk.fsync(aside)
    disk.fsync(directory)
    for older in aside.parent.iterdir():
        if older != aside:
            disk.remove_tree(older)


def _of_others(directory: Path, uid: str) -> Iterator[Path]:
    """Also what cannot be read: this job would find that out of its own, and say so."""
    for series in get_args(Series):
        for step in steps_in(directory, series):
            path = directory / step_directory(step, series)
            try:
                if manifest_in(path).uid == uid:
                    continue
            except (SnapshotError, OSError):
                pass
            yield path
