"""A directory of snapshots in which each one is there whole or not at all.

Saving: files go into a temporary directory, each is summed and fsynced, the manifest is written last, the directory
is fsynced, the fence is checked, and one rename makes it `step-<N>`. Loading: newest to oldest, the first whose
every byte matches its manifest; what does not match is set aside with the reason, never deleted unseen. Without a
fence a store only reads: it verifies and lists, and changes nothing.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import time
from collections.abc import Callable, MutableSequence, Sequence
from pathlib import Path
from typing import TypeVar

from ddp_trainer.contract.exit_codes import FencedError
from ddp_trainer.snapshots.trust.disk import NO_SPACE, Disk
from ddp_trainer.snapshots.trust.errors import CorruptSnapshotError, IncompatibleSnapshotError, SnapshotError
from ddp_trainer.snapshots.trust.fence import Fence
from ddp_trainer.snapshots.trust.manifest import FileEntry, Manifest, SnapshotInfo
from ddp_trainer.snapshots.trust.names import CORRUPT, MANIFEST, TEMPORARY, parse_corrupt, parse_step, step_directory
from ddp_trainer.snapshots.trust.verify import verify_files

log = logging.getLogger(__name__)

Loaded = TypeVar("Loaded")

KEEP_CORRUPT = 2
"""How many set-aside snapshots stay for people to look at: enough to see a pattern, few enough to have room."""
_SLACK = 1 << 20  # the manifest, directory blocks and what the file system rounds up


class SnapshotStore:
    """The snapshots of one job. `keep` newest ones are kept; `fence` None means read only."""

    def __init__(self, directory: Path, *, keep: int, fence: Fence | None, disk: Disk | None = None) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}; at least one snapshot must be kept")
        self.directory = directory
        self.keep = keep
        self.fence = fence
        self.disk = disk or Disk()
        self.set_aside: MutableSequence[SnapshotInfo] = []
        """What this store found not to verify and set aside."""

    def save(self, write: Callable[[Path], None], manifest: Manifest, *, expected_bytes: int = 0) -> Manifest:
        """Have `write` fill a temporary directory and make it `step-<N>`; returns the manifest with its files.

        If an earlier attempt has left a valid snapshot of this step, that one stays and its manifest is
        returned. `expected_bytes` is what `write` is going to write; 0 takes the size of the newest snapshot.

        Raises SnapshotError if it could not be saved (everything saved before is intact, the temporary is gone),
        FencedError if a newer attempt owns the directory (nothing was changed).
        """
        fence = self._writer()
        target = self.directory / step_directory(manifest.step)
        temporary = self.directory / f"{TEMPORARY}{target.name}-{manifest.attempt}-{os.getpid()}"
        try:
            fence.check()
            existing = self._existing(target)
            if existing is not None:
                return existing
            expected_bytes = expected_bytes or self._last_bytes()
            if self._free_bytes() < expected_bytes + _SLACK:
                self._make_room(expected_bytes)
            try:
                saved = self._write(write, manifest, temporary, target)
            except Exception as error:
                self._discard(temporary)
                if not self._is_full(error, expected_bytes) or not self._make_room(expected_bytes):
                    raise
                saved = self._write(write, manifest, temporary, target)
        except FencedError:
            self._discard(temporary)
            raise
        except Exception as error:
            self._discard(temporary)
            raise self._explained(error, manifest.step, expected_bytes, fence) from error
        self._retain(self.keep, spare=manifest.step)
        return saved

    def newest_valid(self) -> Manifest | None:
        """The manifest of the newest snapshot whose every byte verifies, or None. Raises as `load_newest` does."""
        newest = self.load_newest(lambda directory, manifest: verify_files(directory, manifest))
        return newest[0] if newest else None

    def load_newest(self, read: Callable[[Path, Manifest], Loaded]) -> tuple[Manifest, Loaded] | None:
        """The newest snapshot that `read` accepts, with what it read; None if there is none.

        `read` raises CorruptSnapshotError for files that are not what the manifest says. A writer sets such a
        snapshot aside and removes what unfinished saves left; a reader only passes over it. A snapshot that cannot
        be read just now (EIO) is passed over and stays where it is. IncompatibleSnapshotError goes through: the
        snapshot is good and the program does not fit.
        """
        if self.fence is not None:
            self.fence.check()
            self._remove_temporaries()
        for step in reversed(self.steps()):
            directory = self.directory / step_directory(step)
            try:
                manifest = manifest_in(directory)
                return manifest, read(directory, manifest)
            except CorruptSnapshotError as error:
                self._set_aside(directory, str(error))
            except IncompatibleSnapshotError as error:
                raise IncompatibleSnapshotError(f"snapshot {directory} cannot be loaded: {error}") from error
            except OSError as error:
                log.warning("snapshot %s cannot be read (%s); trying the one before", directory, error)
        return None

    def verify(self, step: int) -> Manifest:
        """Read all of one snapshot. Raises CorruptSnapshotError with the first thing wrong, or OSError."""
        directory = self.directory / step_directory(step)
        manifest = manifest_in(directory)
        verify_files(directory, manifest)
        return manifest

    def steps(self) -> Sequence[int]:
        """Steps that have a snapshot by name, ascending; whether it verifies is another question."""
        return steps_in(self.directory)

    def list(self) -> Sequence[SnapshotInfo]:
        """What is there by its manifests, newest first, then what was set aside; no file is read through."""
        return listing(self.directory)

    # Saving, step by step

    def _write(self, write: Callable[[Path], None], manifest: Manifest, temporary: Path, target: Path) -> Manifest:
        # A container restarted in place can have the pid, and so the temporary name, of the one before it.
        self.disk.remove_tree(temporary)
        self.disk.make_directory(temporary)
        write(temporary)
        return self.publish(temporary, manifest, target)

    def publish(self, temporary: Path, manifest: Manifest, target: Path) -> Manifest:
        """Sum and sync what is in `temporary`, add the manifest, and rename it to `target`. Raises OSError or
        FencedError.
        """
        files = {}
        directories = [temporary]
        for path in sorted(temporary.rglob("*")):
            if path.is_dir():
                directories.append(path)
                continue
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            self.disk.fsync(path)
            files[path.relative_to(temporary).as_posix()] = FileEntry(path.stat().st_size, digest)
        saved = manifest.with_files(files)
        self.disk.create(temporary / MANIFEST, [saved.to_json()])
        self.disk.fsync(temporary / MANIFEST)
        for directory in reversed(directories):
            self.disk.fsync(directory)
        self._writer().check()
        self.disk.rename(temporary, target)
        self.disk.fsync(self.directory)
        return saved

    def _existing(self, target: Path) -> Manifest | None:
        # After a resume the same steps are computed again, bitwise the same; a snapshot that survived needs no second
        # writing.
        if not os.path.lexists(target):
            return None
        try:
            manifest = manifest_in(target)
            verify_files(target, manifest)
        except (CorruptSnapshotError, OSError) as error:
            self._set_aside(target, str(error))
            return None
        return manifest

    def _explained(self, error: Exception, step: int, expected_bytes: int, fence: Fence) -> Exception:
        # A newer attempt clears away our temporary: then being fenced is the cause, and the missing file only its sign.
        try:
            fence.check()
        except FencedError as fenced:
            return fenced
        except OSError:
            pass
        if isinstance(error, SnapshotError):
            return error
        what = f"snapshot of step {step} was not saved to {self.directory}"
        if self._is_full(error, expected_bytes):
            return SnapshotError(
                f"{what}: the volume is full ({_mib(self._free_bytes())} free, {_mib(expected_bytes)} needed). "
                "The snapshots before it are intact and training goes on; enlarge the volume or lower snapshots.keep"
            )
        return SnapshotError(
            f"{what}: {error or type(error).__name__}. The snapshots before it are intact and training goes on; "
            "check that the volume is mounted and writable"
        )

    # Room

    def _is_full(self, error: Exception, expected_bytes: int) -> bool:
        # A library that writes on its own may hide ENOSPC behind an error of its own; then the disk itself is asked.
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno in NO_SPACE
        return self._free_bytes() < expected_bytes + _SLACK

    def _free_bytes(self) -> int:
        return self.disk.free_bytes(self.directory)

    def _last_bytes(self) -> int:
        for info in self.list():
            if info.bytes is not None:
                return info.bytes
        return 0

    def _make_room(self, needed: int) -> bool:
        """Do before the save what retention would do after it; True if anything was removed.

        The newest snapshot stays, and nothing is removed unless that one verifies: the others may be all that is left
        to resume from. Raises OSError (ENOSPC) if that cannot be enough.
        """
        before = self._free_bytes()
        self._remove_corrupt(0)
        steps = self.steps()
        if steps:
            try:
                self.verify(steps[-1])
            except (SnapshotError, OSError) as error:
                log.warning(
                    "no snapshot is removed to make room: the newest, step %d, does not verify (%s)", steps[-1], error
                )
            else:
                self._retain(max(1, self.keep - 1))
        after = self._free_bytes()
        if after < needed + _SLACK:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.directory))
        return after > before

    def _retain(self, keep: int, spare: int | None = None) -> None:
        """Remove the oldest snapshots beyond `keep`, never `spare`. A failure is logged: what matters is saved."""
        try:
            for step in self.steps()[:-keep]:
                if step != spare:
                    self._remove(self.directory / step_directory(step))
            self._remove_corrupt(KEEP_CORRUPT)
        except OSError as error:
            log.warning("an old snapshot in %s could not be removed: %s", self.directory, error)

    def _remove_corrupt(self, keep: int) -> None:
        steps = set_aside_in(self.directory)
        for step in steps[: len(steps) - keep]:
            self._remove(self.directory / (step_directory(step) + CORRUPT))

    def _remove(self, directory: Path) -> None:
        # Renamed first: a snapshot half deleted when the process dies must not look like one that went bad.
        self._writer().check()
        gone = self.directory / f"{TEMPORARY}gone-{directory.name}-{os.getpid()}"
        self.disk.remove_tree(gone)
        self.disk.rename(directory, gone)
        self.disk.remove_tree(gone)

    def _remove_temporaries(self) -> None:
        """The owner clears what unfinished saves and removals left, its own from before a restart included."""
        for path in self.directory.glob(f"{TEMPORARY}*"):
            self._discard(path)

    def _discard(self, path: Path) -> None:
        try:
            self.disk.remove_tree(path)
        except OSError as error:
            log.warning("%s could not be removed: %s", path, error)

    def _set_aside(self, directory: Path, reason: str) -> None:
        log.warning("snapshot %s is not used: %s", directory, reason)
        if self.fence is None:
            return
        self.fence.check()
        aside = directory.with_name(directory.name + CORRUPT)
        self.set_aside.append(SnapshotInfo(parse_step(directory.name) or 0, aside, problem=reason))
        try:
            if os.path.lexists(aside):
                self._remove(aside)
            self.disk.rename(directory, aside)
            self.disk.fsync(self.directory)
            if not aside.is_symlink():
                stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
                self.disk.create(
                    aside / "reason.txt", [f"{stamp} attempt {self.fence.own.attempt}: {reason}\n".encode()]
                )
        except OSError as error:
            log.warning("snapshot %s could not be set aside: %s", directory, error)

    def _writer(self) -> Fence:
        if self.fence is None:
            raise SnapshotError(f"{self.directory} was opened for reading: call Fence.acquire before writing")
        return self.fence


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


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
