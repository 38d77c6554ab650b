"""Checkpoints that the training program writes itself, with whatever library, made as trustworthy as our snapshots.

    with checkpoints.writing(Progress(step, epoch, samples)) as folder:      # on every rank
        accelerator.save_state(folder)                                       # or save_pretrained, dcp.save, torch.save
    ...
    newest = checkpoints.newest()                                            # on every rank: (manifest, folder) or None

All ranks write into one temporary directory on the shared volume. After the block the files are shared out among the
ranks to be summed and synced, each to a rank of a node that still has it in memory, so that what one node wrote is not
read back by another. Rank 0 then adds the manifest and renames the directory. A block that fails on any rank leaves
nothing behind, and no rank waits longer than `timeout` for another.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import Any, Final

from ddp_trainer.contract.exit_codes import UserError
from ddp_trainer.snapshots import resuming
from ddp_trainer.snapshots.ranks import Ranks
from ddp_trainer.snapshots.trust.disk import Disk, is_cached
from ddp_trainer.snapshots.trust.errors import CorruptSnapshotError, SnapshotError
from ddp_trainer.snapshots.trust.fence import Fence
from ddp_trainer.snapshots.trust.manifest import FileEntry, Kind, Manifest
from ddp_trainer.snapshots.trust.names import MANIFEST, step_directory
from ddp_trainer.snapshots.trust.store import SnapshotStore
from ddp_trainer.snapshots.trust.verify import files_in, sums, verify_files
from ddp_trainer.snapshots.values import Identity, Progress, SnapshotEvent

TIMEOUT_SECONDS: Final = 1800.0
"""How long a rank waits for the others at the end of a block: one of them may write for all."""

STILL_WRITTEN: Final = (
    "so something still writes into the folder: wait in the block for what was begun there, such as the future of "
    "torch.distributed.checkpoint.async_save"
)

FAREWELL: Final = timedelta(seconds=5)
"""How long a rank that failed in a block gives the others to hear of it."""


class Checkpoints:
    """The checkpoints of a job, in its own directory (`names.job_directory`) beside its snapshots.

    `keep` newest ones are kept. Every method but `path` is a collective of all ranks. `on_event` is called on rank 0.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int,
        identity: Identity,
        global_batch: int = 0,
        on_event: Callable[[SnapshotEvent], None] | None = None,
        timeout: float = TIMEOUT_SECONDS,
        keep_every: int | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self._directory = directory
        self._keep = keep
        self._keep_every = keep_every
        self._config = config
        self._identity = identity
        self._global_batch = global_batch
        self._on_event = on_event
        self._timeout = timeout
        self._ranks: Ranks | None = None
        self._store: SnapshotStore | None = None
        self._step: int | None = None
        """Of the block that is open."""
        self._committed: set[int] = set()
        """Steps, by this attempt."""
        self._failures = 0

    @property
    def fence(self) -> Fence | None:
        """On rank 0, once a method has acquired it."""
        return self._store.fence if self._store is not None else None

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is, if there is one."""
        return self._directory / step_directory(step, "checkpoint")

    @contextmanager
    def writing(self, progress: Progress, *, kind: Kind = "periodic", loss_is_finite: bool = True) -> Iterator[Path]:
        """A folder to write the checkpoint of `progress.step` into; it has its name once the block is over.

        If an earlier attempt has left a valid checkpoint of this step, that one stays. An exception in the block
        reaches its own rank as it is, and the others as SnapshotError. Raises FencedError, and SnapshotError on all
        ranks if the checkpoint cannot be committed, UserError for a step that this attempt has committed before.
        """
        started = time.monotonic()
        ranks = self._acquired()
        if self._step is not None:
            raise UserError(f"the checkpoint of step {self._step} is still open: one at a time")
        if progress.step in self._committed:
            raise UserError(
                f"step {progress.step} has a checkpoint of this run already, which stays as it is: a step has one. "
                "To save again after it, pass step=… with another number, as in run.checkpoint(step=…)"
            )
        manifest = self._identity.manifest(
            progress,
            kind,
            strategy="checkpoint",
            global_batch=self._global_batch,
            loss_is_finite=loss_is_finite,
            config=self._config,
        )
        folder = self._begin(ranks, manifest)
        self._step = progress.step
        try:
            yield folder
        except BaseException as error:
            self._fail(ranks, folder, error)
            raise
        finally:
            self._step = None
        try:
            saved = self._commit(ranks, folder, manifest)
        except SnapshotError as error:
            self._failures += 1
            self._emit(SnapshotEvent("failed", progress.step, str(error), failures=self._failures))
            raise
        self._committed.add(progress.step)
        self._failures = 0
        seconds = time.monotonic() - started
        message = f"checkpoint of step {progress.step} saved in {seconds:.2f} s"
        self._emit(SnapshotEvent("saved", progress.step, message, saved, seconds, seconds))

    def newest(self) -> tuple[Manifest, Path] | None:
        """The newest checkpoint whose every byte verifies, the same on every rank; None if there is none.

        Each rank verifies a part. One that does not verify is set aside. Raises FencedError, and SnapshotError if
        ranks do not see the same files.
        """
        ranks = self._acquired()
        if self._step is not None:
            raise UserError(f"the checkpoint of step {self._step} is still open: ask for the newest after it")
        manifest = self._find(ranks) if ranks.rank == 0 else self._follow(ranks)
        return None if manifest is None else (manifest, self.path(manifest.step))

    def resumed(self, manifest: Manifest) -> None:
        """The program goes on from this checkpoint."""
        self._emit(SnapshotEvent("resumed", manifest.step, resuming.describe(manifest), manifest))

    def _acquired(self) -> Ranks:
        """The ranks, with a group of their own that has our deadline; rank 0 has acquired the fence."""
        if self._ranks is not None:
            return self._ranks
        who = self._identity
        ranks = Ranks(who.rank, who.world_size, own_group=timedelta(seconds=self._timeout))
        error: Exception | None = None
        if who.rank == 0:
            try:
                self._store = resuming.acquire(
                    self._directory, who, keep=self._keep, keep_every=self._keep_every, series="checkpoint"
                )
            except Exception as problem:
                error = problem
        resuming.decided_by_first(ranks, None, error)
        self._ranks = ranks
        return ranks

    # Writing, step by step

    def _begin(self, ranks: Ranks, manifest: Manifest) -> Path:
        folder, error = "", None
        if self._store is not None:
            try:
                folder = str(self._store.begin(manifest))
            except Exception as problem:
                error = problem
        with self._deadline("begin", manifest.step):
            resuming.decided_by_first(ranks, None, error)
            path = Path(ranks.from_first({"folder": folder} if ranks.rank == 0 else None)["folder"])
            missing = None if path.is_dir() else f"{path} is not there: it has to be a volume that all nodes share"
            problem_of_all = _first(ranks.problems(missing))
        if problem_of_all is not None:
            if self._store is not None:
                self._store.abandon(path)
            raise SnapshotError(f"checkpoint of step {manifest.step} was not begun: {problem_of_all}")
        return path

    def _fail(self, ranks: Ranks, folder: Path, error: BaseException) -> None:
        """Tell the other ranks, without waiting for one that may never come. The folder goes once none writes any more,
        at the latest when the next attempt starts.
        """
        self._ranks = None  # a rank that never comes leaves gloo's group of no use: all ranks make another
        try:
            ranks.begin_problems(f"{type(error).__name__}: {error}").wait(FAREWELL)
        except RuntimeError:
            return
        if self._store is not None:
            self._store.abandon(folder)

    def _commit(self, ranks: Ranks, folder: Path, manifest: Manifest) -> Manifest:
        with self._deadline("end", manifest.step):
            failed = _first(ranks.problems(None))
            if failed is not None:
                self._ranks = None  # as on the rank that failed
            if failed is None:
                sizes, failed = self._list(ranks, folder)
            if failed is None:
                entries, failed = self._sum(ranks, folder, sizes)
            if failed is not None:
                if self._store is not None:
                    self._store.abandon(folder)
                raise SnapshotError(f"checkpoint of step {manifest.step} was not committed: {failed}")
            saved, error = None, None
            if self._store is not None:
                try:
                    self._check_unchanged(folder, sizes)
                    saved = self._store.commit(folder, manifest.with_files(entries))
                except Exception as problem:
                    error = problem
            decided = resuming.decided_by_first(ranks, saved, error)
        assert decided is not None
        return decided

    def _list(self, ranks: Ranks, folder: Path) -> tuple[dict[str, int], str | None]:
        """The files by name with their sizes, as rank 0 sees them, and what is wrong with them on any rank."""
        sizes: dict[str, int] = {}
        problem = None
        try:
            _refresh(folder)
            sizes = {name: (folder / name).stat().st_size for name in files_in(folder)}
        except (OSError, SnapshotError) as error:
            problem = str(error)
        first = ranks.from_first({"sizes": sizes} if ranks.rank == 0 else None)["sizes"]
        if problem is None and not first:
            problem = "the block wrote no file into the folder that it was given"
        elif problem is None and MANIFEST in first:
            problem = f"{MANIFEST} is a name of ours: give that file another"
        elif problem is None and (begun := sorted(_unfinished(first))):
            problem = f"there is {begun[0]} and no .metadata beside it, {STILL_WRITTEN}"
        elif problem is None and (unseen := sorted(sizes.keys() - first.keys())):
            problem = f"rank 0 does not see {unseen[0]}: the folder has to be on a volume that all nodes share"
        return first, _first(ranks.problems(problem))

    def _sum(self, ranks: Ranks, folder: Path, sizes: Mapping[str, int]) -> tuple[dict[str, FileEntry], str | None]:
        """The sums of all files, each read by one rank."""
        names = sorted(sizes)
        cached = ranks.values([is_cached(folder / name) for name in names])
        own = share_out([sizes[name] for name in names], cached, ranks.world_size)[ranks.rank]
        entries: dict[str, FileEntry] = {}
        problem = None
        try:
            entries = sums(folder, (names[index] for index in own), Disk())
        except OSError as error:
            problem = str(error)
        failed = _first(ranks.problems(problem))
        summed = ranks.values({name: [entry.bytes, entry.sha256] for name, entry in entries.items()})
        return {name: FileEntry(*entry) for part in summed for name, entry in part.items()}, failed

    def _check_unchanged(self, folder: Path, sizes: Mapping[str, int]) -> None:
        """On rank 0, after the files were summed: raise SnapshotError if they are others than before."""
        assert self._store is not None
        _refresh(folder)
        now = {name: (folder / name).stat().st_size for name in files_in(folder)}
        changed = sorted({name for name, _ in now.items() ^ sizes.items()})
        if changed:
            self._store.abandon(folder)
            raise SnapshotError(f"{changed[0]} has changed after the block, {STILL_WRITTEN}")

    @contextmanager
    def _deadline(self, where: str, step: int) -> Iterator[None]:
        """Turns gloo's timeout, and a lost peer, into an error that says what was waited for."""
        try:
            yield
        except RuntimeError as error:
            self._ranks = None
            raise SnapshotError(
                f"checkpoint of step {step} was not committed: not all ranks came to the {where} of its block within "
                f"{self._timeout:.0f} s, or one was lost ({error}). Every rank has to enter run.checkpoint()"
            ) from error

    # Finding the newest, step by step

    def _find(self, ranks: Ranks) -> Manifest | None:
        """On rank 0."""
        store = self._store
        assert store is not None
        known, passed_over = len(store.set_aside), len(store.unreadable)
        manifest, error = None, None
        try:
            found = store.load_newest(lambda directory, candidate: self._verify(ranks, directory, candidate))
            manifest = found[0] if found is not None else None
        except Exception as problem:
            error = problem
        for info in store.set_aside[known:]:
            text = f"checkpoint of step {info.step} is not used: {info.problem}"
            self._emit(SnapshotEvent("set_aside", info.step, text))
        for info in store.unreadable[passed_over:]:
            self._emit(resuming.passed_over("checkpoint", info))
        return resuming.decided_by_first(ranks, manifest, error)

    def _follow(self, ranks: Ranks) -> Manifest | None:
        """On the other ranks: verify what rank 0 names, until it has decided."""
        while "verify" in (message := ranks.from_first(None)):
            candidate = Manifest.from_json(message["verify"].encode())
            self._verify_part(ranks, self.path(candidate.step), candidate)
        return resuming.decided(message)

    def _verify(self, ranks: Ranks, directory: Path, candidate: Manifest) -> None:
        """On rank 0, as SnapshotStore.load_newest wants it."""
        ranks.from_first({"verify": candidate.to_json().decode()})
        own, problems = self._verify_part(ranks, directory, candidate)
        if own is not None:
            raise own
        for rank, problem in enumerate(problems):
            if problem is not None:
                # Files are set aside only for what their owner finds: that rank's node may have another volume there.
                verify_files(directory, _part(candidate, rank, ranks.world_size))
                raise SnapshotError(
                    f"rank {rank} reads {directory} otherwise than rank 0: {problem}. It has to be a volume that all "
                    "nodes share; check the mount of that node"
                )

    def _verify_part(
        self, ranks: Ranks, directory: Path, candidate: Manifest
    ) -> tuple[Exception | None, Sequence[str | None]]:
        error: Exception | None = None
        try:
            verify_files(directory, _part(candidate, ranks.rank, ranks.world_size))
        except (CorruptSnapshotError, OSError) as problem:
            error = problem
        return error, ranks.problems(None if error is None else str(error))

    def _emit(self, event: SnapshotEvent) -> None:
        if self._on_event is not None and self._identity.rank == 0:
            self._on_event(event)


def share_out(sizes: Sequence[int], cached: Sequence[Sequence[bool]], ranks: int) -> list[list[int]]:
    """Indices of files by the rank that is to read them: the largest first, each to the rank with the least to do among
    those of the nodes that have it in memory (`cached`, rank -> file), or among all if there is none.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        near = [rank for rank in range(ranks) if cached and cached[rank][index]]
        rank = min(near or range(ranks), key=lambda rank: (load[rank], rank))
        shares[rank].append(index)
        load[rank] += sizes[index]
    return shares


def _unfinished(names: Iterable[str]) -> set[str]:
    """Files of torch.distributed.checkpoint whose save has not come to its end, where it writes `.metadata`: one for
    all ranks, or with `use_collectives=False` one for each.
    """
    found = {PurePosixPath(name) for name in names}
    return {str(path) for path in found if path.suffix == ".distcp" and found.isdisjoint(_written_last(path))}


def _written_last(path: PurePosixPath) -> set[PurePosixPath]:
    rank = re.match(r"__[0-9]+(?=_)", path.name)
    names = (".metadata", *([f"{rank[0]}.metadata"] if rank else []))
    return {path.with_name(name) for name in names}


def _part(manifest: Manifest, rank: int, ranks: int) -> Manifest:
    names = sorted(manifest.files)
    shares = share_out([manifest.files[name].bytes for name in names], (), ranks)
    return manifest.with_files({names[index]: manifest.files[names[index]] for index in shares[rank]})


def _first(problems: Sequence[str | None]) -> str | None:
    """The first problem, with its rank."""
    return next((f"rank {rank}: {text}" for rank, text in enumerate(problems) if text is not None), None)


def _refresh(folder: Path) -> None:
    """Make a network file system's client forget its listings (see fence.Fence.check)."""
    for directory, _, _ in os.walk(folder):
        os.utime(directory)
