"""What a job's directory holds, by names and manifests: nothing here reads a file through or changes one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ddp_trainer.snapshots.errors import CorruptSnapshotError, SnapshotError
from ddp_trainer.snapshots.manifest import Manifest, SnapshotInfo
from ddp_trainer.snapshots.names import CORRUPT, MANIFEST, parse_corrupt, parse_step, step_directory


def steps_in(directory: Path) -> Sequence[int]:
    """Steps that have a snapshot by name, ascending; whether it verifies is another question."""
    return _numbers(directory, parse_step)


def set_aside_in(directory: Path) -> Sequence[int]:
    """Steps whose snapshot was set aside, ascending."""
    return _numbers(directory, parse_corrupt)


def manifest_in(snapshot: Path) -> Manifest:
    """The manifest of the snapshot in a directory of its own.

    Raises CorruptSnapshotError where none is right, IncompatibleSnapshotError for a later format, OSError.
    """
    if snapshot.is_symlink():
        raise CorruptSnapshotError("it is a symbolic link")
    manifest = Manifest.read(snapshot)
    if step_directory(manifest.step) != snapshot.name:
        raise CorruptSnapshotError(f"{MANIFEST} is of step {manifest.step}")
    return manifest


def listing(directory: Path) -> Sequence[SnapshotInfo]:
    """All snapshots by their manifests, newest first, then those that were set aside."""
    found = []
    for step in reversed(steps_in(directory)):
        path = directory / step_directory(step)
        try:
            manifest = manifest_in(path)
            found.append(SnapshotInfo(step, path, manifest.time, manifest.kind, manifest.total_bytes))
        except (SnapshotError, OSError) as error:
            found.append(SnapshotInfo(step, path, problem=str(error)))
    for step in reversed(set_aside_in(directory)):
        path = directory / (step_directory(step) + CORRUPT)
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
