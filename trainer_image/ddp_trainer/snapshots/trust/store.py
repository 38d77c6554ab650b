"""A directory of snapshots in which each one is there whole or not at all.

Saving: files go into a temporary directory, each is summed as it is written and fsynced, the manifest is written last,
the directory is fsynced, the fence is checked, and one rename makes it `step-<N>`. Loading: newest to oldest, the first
whose every byte matches its manifest; what does not match is set aside with the reason, never deleted unseen. Without a
fence a store only reads: it verifies and lists, and changes nothing.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from ddp_trainer.contract.exit_codes import FencedError
from ddp_trainer.contract.json_files import FULL
from ddp_trainer.snapshots.trust.disk import UNKNOWN_BYTES, Disk
from ddp_trainer.snapshots.trust.errors import (
    CorruptSnapshotError,
    IncompatibleSnapshotError,
    SnapshotError,
    VolumeFullError,
)
from ddp_trainer.snapshots.trust.fence import Fence
from ddp_trainer.snapshots.trust.listing import listing, manifest_in, set_aside_in, steps_in
from ddp_trainer.snapshots.trust.manifest import FileEntry, Kind, Manifest, SnapshotInfo
from ddp_trainer.snapshots.trust.names import CORRUPT, MANIFEST, TEMPORARY, Series, parse_step, step_directory
from ddp_trainer.snapshots.trust.verify import files_in, verify_files

log = logging.getLogger(__name__)

Loaded = TypeVar("Loaded")

Write = Callable[[Path], Mapping[str, FileEntry]]
"""Fills a directory with files that are synced, and returns what it has written by name."""

KEEP_CORRUPT = 2
"""How many set-aside snapshots stay for people to look at: enough to see a pattern, few enough to have room."""
_GONE = f"{TEMPORARY}gone-"
_HELD = (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY)
_NO_RENAMES = (errno.EMFILE, errno.ENOSYS, errno.ENOTSUP, errno.EPERM, errno.EXDEV)
"""What mounted buckets say of the rename of a folder: gcsfuse EMFILE, mountpoint-s3 EPERM or ENOSYS."""
_SLACK = 1 << 20  # the manifest, directory blocks and what the file system rounds up
ROOM_SECONDS = 10.0
"""How long a removal may take to make room: CephFS purges files later, and ZFS frees them every five seconds."""
HURRIED_ROOM_SECONDS = 3.0
"""The same for a snapshot that is written while a process ends, which has about 20 seconds in all."""
_POLL_SECONDS = 0.2
_BLOCK = 512  # what st_blocks counts, whatever the file system's own are


class _Usage(NamedTuple):
    """Bytes of the volume: free, and in files of one directory."""

    free: int
    used: int


class SnapshotStore:
    """The snapshots of one job; `fence` None means read only. What `keep` and `keep_every` mean is in `retained`.

    Stores of two series share a directory and its fence; each keeps, clears and sets aside what is its own.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int,
        fence: Fence | None,
        disk: Disk | None = None,
        series: Series = "step",
        keep_every: int | None = None,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}; at least one snapshot must be kept")
        self.directory = directory
        self.series = series
        self.keep = keep
        self.keep_every = keep_every
        self._finite: dict[int, bool] = {}
        """Steps whose snapshot's manifest was read for retention, and whether their loss was finite."""
        self.fence = fence
        self.disk = disk or Disk()
        self.set_aside: MutableSequence[SnapshotInfo] = []
        """What this store found not to verify and set aside."""
        self.unreadable: MutableSequence[SnapshotInfo] = []
        """What it could not read just then, and passed over."""
        self._has_cleared = False
        """Whether what unfinished saves had left is gone."""

    def save(self, write: Write, manifest: Manifest, *, expected_bytes: int = 0) -> Manifest:
        """Have `write` fill a temporary directory and make it `step-<N>`; returns the manifest with its files.

        If an earlier attempt has left a valid snapshot of this step, that one stays and its manifest is
        returned. `expected_bytes` is what `write` is going to write; 0 takes the size of the newest snapshot.

        Raises SnapshotError if it could not be saved (everything saved before is intact, the temporary is gone),
        FencedError if a newer attempt owns the directory (nothing was changed).
        """
        fence = self._writer()
        target = self.path(manifest.step)
        temporary = self._temporary(manifest)
        try:
            fence.check()
            self._clear_once()
            existing = self._existing(target)
            if existing is not None:
                return existing
            expected_bytes = expected_bytes or self._last_bytes()
            patience = _patience(manifest.kind)
            if self._free_bytes() < expected_bytes + _SLACK:
                self._make_room(expected_bytes, self._usage(), patience)
            try:
                saved = self._write(write, manifest, temporary, target)
            except Exception as error:
                before = self._usage()
                self._discard(temporary)
                if not self._is_full(error, expected_bytes) or not self._make_room(expected_bytes, before, patience):
                    raise
                saved = self._write(write, manifest, temporary, target)
        except FencedError:
            self._discard(temporary)
            raise
        except Exception as error:
            self._discard(temporary)
            raise self._explained(error, manifest, expected_bytes, fence) from error
        self._retain(self.keep, spare=manifest.step)
        return saved

    def begin(self, manifest: Manifest) -> Path:
        """An empty temporary directory for files that others write; `commit` or `abandon` it.

        Raises FencedError, and SnapshotError if the volume refuses.
        """
        temporary = self._temporary(manifest)
        try:
            self._writer().check()
            self._clear_once()
            expected = self._last_bytes()
            if self._free_bytes() < expected + _SLACK:
                with contextlib.suppress(OSError):  # what is written may be smaller than the last one
                    # all ranks stand still meanwhile
                    self._make_room(expected, self._usage(), patience=0.0)
            self._make_empty(temporary)
        except OSError as error:
            raise self._explained(error, manifest, 0, self._writer()) from error
        return temporary

    def commit(self, temporary: Path, manifest: Manifest) -> Manifest:
        """Make a temporary directory whose files are all in `manifest`, summed and synced, the snapshot of its step.

        As with `save`, a valid snapshot of this step by an earlier attempt stays. Raises as `save` does.
        """
        target = self.path(manifest.step)
        try:
            existing = self._existing(target)
            saved = existing or self._publish(temporary, manifest, target)
        except FencedError:
            self._discard(temporary)
            raise
        except Exception as error:
            self._discard(temporary)
            raise self._explained(error, manifest, 0, self._writer()) from error
        if existing is not None:
            self._discard(temporary)
        self._retain(self.keep, spare=manifest.step)
        return saved

    def abandon(self, temporary: Path) -> None:
        """Remove a temporary directory that will not be committed."""
        self._discard(temporary)

    def discard(self, step: int) -> None:
        """Remove the snapshot of a step. Raises FencedError, OSError."""
        self._remove(self.path(step))

    def path(self, step: int) -> Path:
        """Where the snapshot of a step is, if there is one."""
        return self.directory / step_directory(step, self.series)

    def newest_valid(self) -> Manifest | None:
        """The manifest of the newest snapshot whose every byte verifies, or None. Raises as `load_newest` does."""
        newest = self.load_newest(lambda directory, manifest: verify_files(directory, manifest))
        return newest[0] if newest else None

    def load_newest(self, read: Callable[[Path, Manifest], Loaded]) -> tuple[Manifest, Loaded] | None:
        """The newest snapshot that `read` accepts, with what it read; None if there is none.

        `read` raises CorruptSnapshotError for files that are not what the manifest says. A writer sets such a
        snapshot aside and removes what unfinished saves left; a reader only passes over it, and looks again where the
        job has saved meanwhile. A snapshot that cannot be read just now (EIO) is passed over and stays where it is;
        SnapshotError if no other one can be used, since to begin anew would throw away all steps for an error that may
        be over in a minute. IncompatibleSnapshotError goes through: the snapshot is good and the program does not fit.
        """
        if self.fence is not None:
            self.fence.check()
            self._remove_temporaries()
        known, steps = len(self.unreadable), self.steps()
        for step in reversed(steps):
            directory = self.path(step)
            try:
                manifest = manifest_in(directory)
                return manifest, read(directory, manifest)
            except CorruptSnapshotError as error:
                self._set_aside(directory, str(error))
            except IncompatibleSnapshotError as error:
                raise IncompatibleSnapshotError(f"snapshot {directory} cannot be loaded: {error}") from error
            except OSError as error:
                log.warning("snapshot %s cannot be read (%s); trying the one before", directory, error)
                self.unreadable.append(SnapshotInfo(step, directory, problem=str(error)))
        if self.fence is None and not set(self.steps()) <= set(steps):
            # the job has saved meanwhile, and its retention removed what was found here
            del self.unreadable[known:]
            return self.load_newest(read)
        if unreadable := self.unreadable[known:]:
            these = ", ".join(f"{info.path.name} ({info.problem})" for info in unreadable)
            raise SnapshotError(
                f"no snapshot in {self.directory} can be used, and these cannot be read: {these}. They are "
                "left as they are; check the volume's server and its network, and start the job again. Where they are "
                "lost for good, remove them or give the job another name to start over"
            )
        return None

    def verify(self, step: int) -> Manifest:
        """Read all of one snapshot. Raises CorruptSnapshotError with the first thing wrong, or OSError."""
        directory = self.path(step)
        manifest = manifest_in(directory)
        verify_files(directory, manifest)
        return manifest

    def steps(self) -> Sequence[int]:
        """Steps that have a snapshot by name, ascending; whether it verifies is another question."""
        return steps_in(self.directory, self.series)

    def list(self) -> Sequence[SnapshotInfo]:
        """What is there by its manifests, newest first, then what was set aside; no file is read through."""
        return listing(self.directory, self.series)

    # Saving, step by step

    def _write(self, write: Write, manifest: Manifest, temporary: Path, target: Path) -> Manifest:
        self._make_empty(temporary)
        # What was to be written counts, not what can be read back now: the volume may have lost some of it already.
        files = write(temporary)
        found = {name: (temporary / name).stat().st_size for name in files_in(temporary)}
        wrong = sorted({name for name, _ in found.items() ^ {name: files[name].bytes for name in files}.items()})
        if wrong:
            raise SnapshotError(f"{wrong[0]} {_difference(found.get(wrong[0]), files.get(wrong[0]))}; check the volume")
        return self._publish(temporary, manifest.with_files(files), target)

    def _make_empty(self, temporary: Path) -> None:
        # A container restarted in place can have the pid, and so the temporary name, of the one before it.
        self.disk.remove_tree(temporary)
        try:
            self.disk.make_directory(temporary)
        except FileExistsError:
            # A client of NFS that lost the reply asks again, and hears of the folder that it has made.
            if any(temporary.iterdir()):
                raise

    def _publish(self, temporary: Path, manifest: Manifest, target: Path) -> Manifest:
        """Add the manifest to summed and synced files, and rename the directory. Raises OSError or FencedError, and
        SnapshotError for one that could not be read again: all snapshots before it would be set aside like it.
        """
        content = manifest.to_json()
        Manifest.from_json(content)
        self.disk.create(temporary / MANIFEST, [content])
        for directory in sorted((path for path in temporary.rglob("*") if path.is_dir()), reverse=True):
            self.disk.fsync(directory)
        self.disk.fsync(temporary)
        self._writer().check()
        try:
            self.disk.rename(temporary, target)
        except OSError:
            # A client of NFS that lost the reply asks again, and hears that there is nothing of that name any more.
            if not self._is_renamed(temporary, target, manifest):
                raise
        self.disk.fsync(self.directory)
        return manifest

    def _is_renamed(self, temporary: Path, target: Path, manifest: Manifest) -> bool:
        """Whether a rename that failed has been done all the same: the name has what was to get it."""
        try:
            with contextlib.suppress(PermissionError):
                os.utime(self.directory)  # or the client may answer from its cache (see fence.Fence.check)
            is_left = any(path.name == temporary.name for path in self.directory.iterdir())
            return not is_left and (target / MANIFEST).read_bytes() == manifest.to_json()
        except OSError:
            return False

    def _temporary(self, manifest: Manifest) -> Path:
        name = step_directory(manifest.step, self.series)
        return self.directory / f"{TEMPORARY}{name}-{manifest.attempt}-{os.getpid()}"

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

    def _explained(self, error: Exception, manifest: Manifest, expected_bytes: int, fence: Fence) -> Exception:
        # A newer attempt clears away our temporary: then being fenced is the cause, and the missing file only its sign.
        try:
            fence.check()
        except FencedError as fenced:
            return fenced
        except OSError:
            pass
        if isinstance(error, SnapshotError) and not isinstance(error, VolumeFullError):
            return error
        what = f"snapshot of step {manifest.step} was not saved to {self.directory}"
        goes_on = " and training goes on" if manifest.kind == "periodic" else ""  # others are saved when it ends
        if self._is_full(error, expected_bytes):
            needed = expected_bytes + _SLACK
            return SnapshotError(
                f"{what}: the volume is full ({self._free_in_words(needed)}{_mib(needed)} needed). The snapshots "
                f"before it are intact{goes_on}; enlarge the volume or lower snapshots.keep"
            )
        if isinstance(error, OSError) and error.errno in _NO_RENAMES and error.filename2 is not None:
            return SnapshotError(
                f"{what}: the volume did not rename a folder ({error.strerror}), as mounted buckets may not. The "
                f"snapshots before it are intact{goes_on}; use a file system for the volume, or a bucket with a "
                "hierarchical namespace"
            )
        return SnapshotError(
            f"{what}: {error or type(error).__name__}. The snapshots before it are intact{goes_on}; "
            "check that the volume is mounted and writable"
        )

    # Room

    def _is_full(self, error: Exception, expected_bytes: int) -> bool:
        # A library that writes on its own may hide ENOSPC behind an error of its own; then the disk itself is asked.
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno in FULL
        if isinstance(error, VolumeFullError):
            return True
        return self._free_bytes() < expected_bytes + _SLACK

    def _free_bytes(self) -> int:
        return self.disk.free_bytes(self.directory)

    def _free_in_words(self, needed: int) -> str:
        """Before what is needed; with the inodes where it cannot be for bytes that the volume is full."""
        free, inodes = self._free_bytes(), self.disk.free_inodes(self.directory)
        if free == UNKNOWN_BYTES:
            return ""
        return f"{_mib(free)} free, " if free < needed or inodes is None else f"{_mib(free)} and {inodes} inodes free, "

    def _last_bytes(self) -> int:
        for info in self.list():
            if info.bytes is not None:
                return info.bytes
        return 0

    def _usage(self) -> _Usage:
        try:
            return _Usage(self._free_bytes(), _bytes_in(self.directory))
        except OSError:
            return _Usage(0, 0)

    def _make_room(self, needed: int, before: _Usage, patience: float) -> bool:
        """Do before the save what retention would do after it; True if anything was removed.

        The space of what was removed since `before` is waited for, for `patience` seconds at most.

        The newest snapshot stays, and no other one is removed unless that one verifies: they may be all that is left to
        resume from. Those that were set aside as corrupt go in any case. Raises OSError (ENOSPC) if nothing is removed
        and there is too little room. After a removal only the write can tell: a quota need not show in what the file
        system says is free.
        """
        is_removed = self._remove_gone() | self._remove_corrupt(0)
        steps = self.steps()
        if steps:
            try:
                self.verify(steps[-1])
            except (SnapshotError, OSError) as error:
                log.warning(
                    "no snapshot is removed to make room: the newest, step %d, does not verify (%s)", steps[-1], error
                )
            else:
                is_removed |= self._retain(max(1, self.keep - 1))
        if is_removed:
            self._await_room(needed, before, patience)
        elif self._free_bytes() < needed + _SLACK:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.directory))
        return is_removed

    def _await_room(self, needed: int, before: _Usage, patience: float) -> None:
        """Until more is free than before the removal, and enough, or all that was removed: no more is going to come."""
        deadline = time.monotonic() + patience
        freed = max(0, before.used - _bytes_in(self.directory))
        awaited = min(max(needed + _SLACK, before.free + 1), before.free + freed)
        while (free := self._free_bytes()) != UNKNOWN_BYTES and free < awaited:
            if time.monotonic() >= deadline:
                return
            time.sleep(_POLL_SECONDS)

    def _retain(self, keep: int, spare: int | None = None) -> bool:
        """Remove what is not to be retained, never `spare`; True if anything was removed. A failure is logged: what
        matters is saved.
        """
        is_removed = False
        try:
            self._remove_gone()
            steps = self.steps()
            kept = retained(steps, self._is_finite, keep=keep, every=self.keep_every)
            for step in steps:
                if step not in kept and step != spare:
                    self._remove(self.path(step))
                    is_removed = True
            is_removed |= self._remove_corrupt(KEEP_CORRUPT)
        except OSError as error:
            log.warning("an old snapshot in %s could not be removed: %s", self.directory, error)
        return is_removed

    def _is_finite(self, step: int) -> bool:
        """Whether the loss of a snapshot's step was; True where its manifest cannot be read, which says nothing."""
        if step not in self._finite:
            try:
                self._finite[step] = manifest_in(self.path(step)).loss_is_finite
            except (SnapshotError, OSError):
                return True
        return self._finite[step]

    def _remove_corrupt(self, keep: int) -> bool:
        steps = set_aside_in(self.directory, self.series)
        removed = steps[: max(0, len(steps) - keep)]
        for step in removed:
            path = self.path(step)
            self._remove(path.with_name(path.name + CORRUPT))
        return bool(removed)

    def _remove(self, directory: Path) -> None:
        # Renamed first: a snapshot half deleted when the process dies must not look like one that went bad.
        self._writer().check()
        gone = self.directory / f"{_GONE}{directory.name}-{os.getpid()}"
        self._clear(gone)
        if os.path.lexists(gone):
            gone = gone.with_name(f"{gone.name}-{time.time_ns()}")
        self.disk.rename(directory, gone)
        self._clear(gone)

    def _remove_gone(self) -> bool:
        """Delete what removals before have left; True if any of it is gone now."""
        left = list(self.directory.glob(f"{_GONE}{self.series}-*"))
        if left:
            self._writer().check()
        for path in left:
            self._discard(path)
        return not all(os.path.lexists(path) for path in left)

    def _clear(self, gone: Path) -> None:
        """Delete what has no name of ours any more. A client of NFS keeps what a process of its node has open, under
        another name, and the folder with it: that is left for the next removal. Raises OSError.
        """
        try:
            self.disk.remove_tree(gone)
        except OSError as error:
            if error.errno not in _HELD:
                raise
            log.warning("%s is not deleted yet, something on this node still has it open: %s", gone, error)

    def _remove_temporaries(self) -> None:
        """The owner clears what unfinished saves and removals left, its own from before a restart included."""
        left = [path for begins in (TEMPORARY, _GONE) for path in self.directory.glob(f"{begins}{self.series}-*")]
        if left:
            # Listed before: what a newer owner writes is not among them, however long the volume then hangs here.
            self._writer().check()
        for path in left:
            self._discard(path)
        self._has_cleared = True

    def _clear_once(self) -> None:
        """The same before a first save, where nothing was loaded: by a rank that leads live, in the place of one that
        was lost in a save, and of checkpoints that a program writes beside snapshots and does not ask for.
        """
        if not self._has_cleared:
            self._remove_temporaries()

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
        step = parse_step(directory.name, self.series) or 0
        self.set_aside.append(SnapshotInfo(step, aside, problem=reason))
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


def _patience(kind: Kind) -> float:
    return HURRIED_ROOM_SECONDS if kind in ("emergency", "preempted") else ROOM_SECONDS


def _bytes_in(directory: Path) -> int:
    """What the files below a directory take up, or less; those that vanish meanwhile are left out."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                status = Path(folder, name).lstat()
                # compressed or with holes a file takes up less than its size; some file systems count no blocks
                total += min(status.st_size, status.st_blocks * _BLOCK or status.st_size)
    return total


def retained(
    steps: Sequence[int], is_finite: Callable[[int], bool], *, keep: int, every: int | None = None
) -> frozenset[int]:
    """Which of the snapshots of these steps, ascending, stay: the newest, which is resumed from; the `keep` newest of
    steps with a finite loss; and the first at or after each multiple of `every` steps.
    """
    newest: list[int] = []
    for step in reversed(steps):
        if len(newest) == keep:
            break
        if is_finite(step):
            newest.append(step)
    milestones: list[int] = []
    for step in steps if every else ():
        assert every is not None
        if step // every > (milestones[-1] // every if milestones else 0):
            milestones.append(step)
    return frozenset((*steps[-1:], *newest, *milestones))


def _difference(found: int | None, written: FileEntry | None) -> str:
    there = "is not there" if found is None else f"has {found} bytes"
    return f"{there}, and {'nothing was' if written is None else f'{written.bytes} bytes were'} written to it"


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
