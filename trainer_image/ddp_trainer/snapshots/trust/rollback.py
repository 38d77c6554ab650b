"""Rolling back: what an attempt asks of the next one after a loss that is not finite.

    checkpoints/<job>/rollbacks/<fencing token>           {"step": 120}
    checkpoints/<job>/rollbacks/<fencing token>.done      the same, carried out

The attempt that finds the loss of a step not finite writes the file and ends. The next one, once it owns the directory,
removes the snapshots that may hold what led to it, and resumes from the newest that is left. A snapshot is sound if the
loss of the step after it was finite, since that is computed from its weights: those of `step - 1` and later go. Where
it carries out a restore, none goes: a person has chosen then.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, get_args

from ddp_trainer.snapshots.trust.disk import Disk
from ddp_trainer.snapshots.trust.fence import Fence
from ddp_trainer.snapshots.trust.names import Series
from ddp_trainer.snapshots.trust.store import SnapshotStore

log = logging.getLogger(__name__)

MOST: Final = 3
"""Rollbacks of a job: where the loss is not finite with other batches either, the cause is another."""

_FOLDER: Final = "rollbacks"
_DONE: Final = ".done"


def ask(fence: Fence, *, step: int, disk: Disk | None = None) -> None:
    """Have the next attempt go back to before `step`. Raises FencedError, OSError."""
    disk = disk or Disk()
    fence.check()
    folder = fence.directory / _FOLDER
    with contextlib.suppress(FileExistsError):
        disk.make_directory(folder)
    path = folder / fence.own.name
    with contextlib.suppress(FileExistsError):
        disk.create(path, [json.dumps({"step": step}).encode()])
    disk.fsync(path)
    disk.fsync(folder)


def asked(fence: Fence) -> list[int]:
    """Each step that this job was rolled back to before, this time included; 0 where a crash cut the request short.
    Raises OSError.

    A job is known by its uid alone: without an operator, `created` is that of each attempt.
    """
    names = [name for name in _names(fence.directory) if _uid(name) == fence.own.uid]
    return [_step(fence.directory / _FOLDER / name) or 0 for name in names]


def carry_out(directory: Path, fence: Fence, *, keep: int, disk: Disk | None = None) -> None:
    """Remove the snapshots and checkpoints that earlier attempts asked to go back behind. Raises FencedError, OSError.

    Carried out again after a crash in the middle of it, it removes nothing else: no snapshot is saved before its end.
    """
    disk = disk or Disk()
    pending = _pending(directory)
    if not pending:
        return
    fence.check()
    steps = [step for name in pending if (step := _step(directory / _FOLDER / name)) is not None]
    for series in get_args(Series) if steps else ():
        store = SnapshotStore(directory, keep=keep, fence=fence, disk=disk, series=series)
        for found in store.steps():
            if found >= min(steps) - 1:
                log.warning("%s %d is removed: the loss of step %d is not finite", series, found, min(steps))
                store.discard(found)
    _close(directory, pending, disk)


def supersede(directory: Path, disk: Disk) -> None:
    """Remove nothing for what was asked: a person has chosen the snapshot to begin from. Raises OSError.

    It counts all the same: the batches of those steps are skipped.
    """
    if pending := _pending(directory):
        log.warning("the rollbacks asked for (%d) remove no snapshot: a restore comes first", len(pending))
        _close(directory, pending, disk)


def _pending(directory: Path) -> list[str]:
    return [name for name in _names(directory) if not name.endswith(_DONE)]


def _close(directory: Path, pending: Sequence[str], disk: Disk) -> None:
    for name in pending:
        disk.rename(directory / _FOLDER / name, directory / _FOLDER / f"{name}{_DONE}")
    disk.fsync(directory / _FOLDER)


def _names(directory: Path) -> Iterator[str]:
    with contextlib.suppress(FileNotFoundError):
        yield from sorted(path.name for path in (directory / _FOLDER).iterdir())


def _uid(name: str) -> str:
    return name.removesuffix(_DONE).split("-", 2)[-1]


def _step(path: Path) -> int | None:
    """None after a crash between creating and writing: that attempt failed in another way. Raises OSError where it
    cannot be read: without the step of a request, the snapshots of before would stay, and the request be over.
    """
    try:
        step = json.loads(path.read_bytes())["step"]
    except (ValueError, LookupError, TypeError):
        return None
    return step if isinstance(step, int) else None
