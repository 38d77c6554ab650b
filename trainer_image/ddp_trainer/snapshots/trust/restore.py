"""Restoring: a person chooses the snapshot that the next attempt begins from.

    checkpoints/<job>/restore.json                              {"step": 400, "after": "<fencing token>", "aside": ""}
    checkpoints/<job>/aside/<fencing token>/step-000000000600

The request moves nothing: an attempt on a lost node may still be saving, and what it saves is newer. The next attempt,
once it owns the directory, moves all that is newer than the step to `aside`, from where nothing removes it. A snapshot
that is there can be restored in its turn: `aside` in the request is its folder's name then. One of the same step that
an attempt on a lost node saves meanwhile is moved to `aside` for it, as a newer one is.

`after` is the newest fencing token at the time of the request. Once an attempt after it has saved, the request is out
of date: steps that were trained since are not set aside. Nor is anything where the snapshot of the step is gone, as by
`rm`, or by the retention of an attempt on a lost node: the next attempt would begin from an older one, or anew. The
same goes for a snapshot of another job where this one begins anew (`spec.snapshots.resume: Own`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple, get_args

from ddp_trainer.snapshots.trust import rollback
from ddp_trainer.snapshots.trust.disk import Disk
from ddp_trainer.snapshots.trust.errors import SnapshotError
from ddp_trainer.snapshots.trust.fence import Fence, history
from ddp_trainer.snapshots.trust.listing import manifest_in, steps_in
from ddp_trainer.snapshots.trust.names import TEMPORARY, Series, step_directory
from ddp_trainer.snapshots.trust.verify import verify_files

log = logging.getLogger(__name__)

REQUEST: Final = "restore.json"
FOLDER: Final = "aside"


class Request(NamedTuple):
    """What is to be restored."""

    step: int
    after: str
    """The fencing token that was the newest then; empty if there was none."""

    aside: str = ""
    """The folder in `aside` that it was in then; empty if it was not set aside."""


def ask(directory: Path, step: int, disk: Disk | None = None) -> Sequence[Path]:
    """Have the next attempt begin from the snapshot of this step, which is verified first. Returns what is newer.

    Raises SnapshotError if there is none or it does not verify, OSError.
    """
    disk = disk or Disk()
    found = _of_step(directory, step)
    if not found:
        raise SnapshotError(f"there is no snapshot of step {step}; `ls` lists those there are")
    for path in found:
        try:
            verify_files(path, manifest_in(path))
        except SnapshotError as error:
            raise SnapshotError(f"{path.name} is not restored, it does not verify: {error}") from error
    after = max((attempt.name for attempt in history(directory)), default="")
    folder = found[0].parent
    request = Request(step, after, "" if folder == directory else folder.name)
    written = directory / f"{TEMPORARY}{REQUEST}-{os.getpid()}"
    written.unlink(missing_ok=True)
    disk.create(written, [json.dumps(request._asdict()).encode()])
    disk.rename(written, directory / REQUEST)
    disk.fsync(directory)
    return _newer(directory, step)


def asked(directory: Path) -> Request | None:
    """What the next attempt is asked to restore.

    Raises OSError where the volume cannot say: an attempt that took that for no would save newer ones, and the next
    would find the request out of date.
    """
    try:
        fields = json.loads((directory / REQUEST).read_bytes())
        return Request(int(fields["step"]), str(fields["after"]), str(fields.get("aside", "")))
    except (FileNotFoundError, ValueError, OverflowError, LookupError, TypeError):
        return None


def carry_out(directory: Path, fence: Fence, disk: Disk | None = None, *, begins_anew: bool = False) -> None:
    """Do what was asked for before this attempt began. Raises FencedError, OSError.

    A job that `begins_anew` moves nothing for a snapshot of another one: that would be set aside right after (see
    `earlier`), and this job begin from an older one of its own, or from none.

    Carried out again after a crash in the middle of it, also by another attempt, it does the rest.
    """
    disk = disk or Disk()
    request = asked(directory)
    if request is None:
        return
    fence.check()
    if fence.own.name <= request.after:
        # it has trained before, and may acquire the directory again: the steps that it saves are the newer ones
        log.warning(
            "step %d is not restored by this attempt, which began before that was asked for: the next one does, with a "
            "greater DDPJOB_ATTEMPT or DDPJOB_CREATED",
            request.step,
        )
        return
    if (late := _saved_since(directory, request)) is not None:
        log.warning("step %d is not restored: %s was saved after that was asked for", request.step, late.name)
    elif not (found := _of_step(directory, request.step, request.aside)):
        log.warning(
            "step %d is not restored: its snapshot has been removed since that was asked for; no other one is moved",
            request.step,
        )
    elif begins_anew and not _are_of(fence.own.uid, found):
        log.warning(
            "step %d is not restored: an earlier job saved it, and this one begins anew (spec.snapshots.resume: Own, "
            "or --fresh); with resume: Any, or --resume, it would be",
            request.step,
        )
    else:
        _restore(directory, request.step, found, directory / FOLDER / fence.own.name, disk)
        # before the request is removed: without it, a rollback would remove what was restored
        rollback.supersede(directory, disk)
    disk.remove_tree(directory / REQUEST)
    disk.fsync(directory)


def aside_in(directory: Path) -> Sequence[Path]:
    """What restores have set aside, those of the last one first."""
    try:
        folders = sorted((directory / FOLDER).iterdir(), reverse=True)
    except FileNotFoundError:
        return []
    return [
        folder / step_directory(step, series)
        for folder in folders
        for series in get_args(Series)
        for step in reversed(steps_in(folder, series))
    ]


def _restore(directory: Path, step: int, found: Sequence[Path], aside: Path, disk: Disk) -> None:
    back = [path for path in found if path.parent != directory]
    newer = [*_newer(directory, step), *(directory / path.name for path in back if _is_there(directory / path.name))]
    for folder in (aside.parent, aside) if newer else ():
        with contextlib.suppress(FileExistsError):
            disk.make_directory(folder)
    for path in newer:
        disk.rename(path, aside / path.name)
    if newer:
        disk.fsync(aside)
    for path in back:
        disk.rename(path, directory / path.name)
    disk.fsync(directory)
    moved = f"; {len(newer)} newer ones are now in {aside}" if newer else ""
    log.warning("this attempt begins from the snapshot of step %d, as was asked for%s", step, moved)


def _of_step(directory: Path, step: int, came_from: str = "") -> Sequence[Path]:
    """The snapshot and the checkpoint of this step; where there is neither, those that were set aside last.

    What is in the folder `came_from` was asked for, and comes before the same in the directory, which was saved since.
    Where a crash came between the two on their way back, one is in the directory and the other still in the folder.
    """
    names = [step_directory(step, series) for series in get_args(Series)]
    aside = [path for path in aside_in(directory) if path.name in names]
    asked_for = {path.name: path for path in aside if path.parent.name == came_from}
    here = {name: directory / name for name in names if _is_there(directory / name)}
    if found := here | asked_for:
        return list(found.values())
    return [path for path in aside if path.parent == aside[0].parent]


def _are_of(uid: str, found: Sequence[Path]) -> bool:
    """Whether the job with this uid saved them, as far as their manifests can be read. Raises OSError."""
    for path in found:
        with contextlib.suppress(SnapshotError):
            if manifest_in(path).uid != uid:
                return False
    return True


def _is_there(path: Path) -> bool:
    """Raises OSError where the volume cannot say: os.path.lexists takes that for no."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    return True


def _newer(directory: Path, step: int) -> Sequence[Path]:
    return [
        directory / step_directory(found, series)
        for series in get_args(Series)
        for found in steps_in(directory, series)
        if found > step
    ]


def _saved_since(directory: Path, request: Request) -> Path | None:
    """A snapshot or checkpoint of an attempt that began after the request.

    A manifest names its attempt by uid and number. Without an operator all attempts share those, so it does not say
    whether that attempt began before or since: the request is not out of date then.
    """
    attempts = history(directory)
    before = {(found.uid, found.attempt) for found in attempts if found.name <= request.after}
    since = {(found.uid, found.attempt) for found in attempts if found.name > request.after} - before
    for series in get_args(Series):
        for step in steps_in(directory, series):
            path = directory / step_directory(step, series)
            with contextlib.suppress(SnapshotError, OSError):
                manifest = manifest_in(path)
                if (manifest.uid, manifest.attempt) in since:
                    return path
    return None
