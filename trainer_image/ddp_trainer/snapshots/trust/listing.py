"""What a job's directory has, by names and manifests alone: no file is read through, and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

from ddp_trainer.snapshots.trust.errors import CorruptSnapshotError, SnapshotError
from ddp_trainer.snapshots.trust.manifest import Manifest, SnapshotInfo
from ddp_trainer.snapshots.trust.names import CORRUPT, MANIFEST, Series, parse_corrupt, parse_step, step_directory


def steps_in(directory: Path, series: Series = "step") -> Sequence[int]:
    """Steps that have a snapshot by name, ascending; whether it verifies is another question."""
    return _numbers(directory, lambda name: parse_step(name, series))


def set_aside_in(directory: Path, series: Series = "step") -> Sequence[int]:
    """Steps whose snapshot was set aside, ascending."""
    return _numbers(directory, lambda name: parse_corrupt(name, series))


def manifest_in(snapshot: Path) -> Manifest:
    """The manifest of the snapshot in a directory of its own.

    Raises CorruptSnapshotError where none is right, IncompatibleSnapshotError for a later format, OSError.
    """
    if snapshot.is_symlink():
        raise CorruptSnapshotError("it is a symbolic link")
    manifest = Manifest.read(snapshot)
    if all(step_directory(manifest.step, series) != snapshot.name for series in get_args(Series)):
        raise CorruptSnapshotError(f"{MANIFEST} is of step {manifest.step}")
    return manifest


def listing(directory: Path, series: Series = "step") -> Sequence[SnapshotInfo]:
    """All snapshots by their manifests, newest first, then those that were set aside. Listed again where the retention
    of a job that runs removed one meanwhile: the job has saved another one then.
    """
    found = []
    for step in reversed(steps_in(directory, series)):
        path = directory / step_directory(step, series)
        try:
            manifest = manifest_in(path)
            size, finite = manifest.total_bytes, manifest.loss_is_finite
            found.append(SnapshotInfo(step, path, manifest.time, manifest.kind, size, loss_is_finite=finite))
        except (SnapshotError, OSError) as error:
            if step not in steps_in(directory, series):
                return listing(directory, series)
            found.append(SnapshotInfo(step, path, problem=str(error)))
    for step in reversed(set_aside_in(directory, series)):
        path = directory / (step_directory(step, series) + CORRUPT)
        found.append(SnapshotInfo(step, path, problem=_reason(path)))
    return found


def _numbers(directory: Path, parse: Callable[[str], int | None]) -> Sequence[int]:
    try:
        names = [path.name for path in directory.iterdir()]
    except FileNotFoundError:
        return []
    return sorted(step for step in map(parse, names) if step is not None)


def _reason(aside: Path) -> str:
    try:
        return (aside / "reason.txt").read_text(errors="replace").strip()
    except OSError:
        return "set aside; its reason.txt is missing"
