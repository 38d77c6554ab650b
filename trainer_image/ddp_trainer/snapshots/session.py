"""Snapshots as a training loop uses them: resume once, say when a step is done, close at the end.

Every rank makes the same calls. Rank 0 owns the volume: it claims it, chooses what to resume from, writes, and tells
the others; no rank ever acts on what it alone sees of a shared file system. Training stops only while states are copied
into buffers.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ddp_trainer.errors import FencedError, UserError
from ddp_trainer.snapshots import rng
from ddp_trainer.snapshots.background import BackgroundWriter, Outcome
from ddp_trainer.snapshots.errors import CorruptSnapshotError, IncompatibleSnapshotError, SnapshotError
from ddp_trainer.snapshots.every import Every, Timetable
from ddp_trainer.snapshots.fence import Fence, history
from ddp_trainer.snapshots.interval import Interval, choose
from ddp_trainer.snapshots.manifest import Kind, Manifest
from ddp_trainer.snapshots.names import job_directory, step_directory
from ddp_trainer.snapshots.ranks import Ranks
from ddp_trainer.snapshots.state import RNG, Staging, Stateful, parse_files, read_files
from ddp_trainer.snapshots.store import SnapshotStore

log = logging.getLogger(__name__)

FAILING_AFTER = 3
"""So many saves failed in a row are no accident: SnapshotsFailing."""
PATIENCE_SECONDS = 1.0
"""A save in flight for less than this is waited for when the next is due; a slower one makes the next be skipped."""
SAVE_TIMEOUT_SECONDS = 600.0
"""How long a wait for a save may take before the disk is taken for hung."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Which life of which job this process is a rank of. `created` is the job's creation time in whole seconds."""

    job: str
    uid: str
    created: int
    attempt: int
    rank: int
    world_size: int
    nodes: int = 1


@dataclass(frozen=True, slots=True)
class Progress:
    """Where training stands after a step: finished optimizer steps, whole epochs, global samples."""

    step: int
    epoch: int
    samples: int


@dataclass(frozen=True, slots=True)
class SnapshotEvent:
    """Something a person or a metric should know. Delivered on the training thread, on rank 0 unless it says `resumed` or `reseeded`.

    `failures` counts failed saves in a row; FAILING_AFTER of them make SnapshotsFailing. `interval` is set on `saved`
    for `auto`.
    """

    result: Literal["saved", "failed", "skipped", "set_aside", "resumed", "reseeded"]
    step: int
    message: str
    manifest: Manifest | None = None
    stall_seconds: float = 0.0
    save_seconds: float = 0.0
    failures: int = 0
    interval: Interval | None = None


class Snapshots:
    """Saves and restores `stateful` (name -> object) in `directory`, which is the job's own (`names.job_directory`).

    A model wrapped by DistributedDataParallel, DataParallel or torch.compile is saved as the model inside, so that it
    can be resumed under another strategy and exported.
    """

    def __init__(
        self,
        directory: Path,
        stateful: Mapping[str, Stateful],
        *,
        every: Every,
        keep: int,
        identity: Identity,
        strategy: str,
        global_batch: int,
        on_event: Callable[[SnapshotEvent], None] | None = None,
        save_timeout: float = SAVE_TIMEOUT_SECONDS,
    ) -> None:
        if RNG in stateful:
            raise UserError(
                f"a state may not be called {RNG!r}: the random number generators are saved under that name"
            )
        self.directory = directory
        self.every = every
        self.identity = identity
        self.last_saved: Manifest | None = None
        """The newest snapshot that is known to be whole: resumed from, or saved since. Rank 0 only after the first
        save.
        """
        self._stateful = {name: _unwrap(value) for name, value in stateful.items()}
        self._keep = keep
        self._strategy = strategy
        self._global_batch = global_batch
        self._on_event = on_event
        self._save_timeout = save_timeout
        self._ranks = Ranks(identity.rank, identity.world_size)
        self._store: SnapshotStore | None = None
        self._staging = Staging()
        self._writer = BackgroundWriter()
        self._staged_step: int | None = None
        self._failures = 0
        self._timetable: Timetable | None = None
        self._next_look: int | None = None

    @classmethod
    def from_env(
        cls,
        stateful: Mapping[str, Stateful],
        *,
        strategy: str,
        global_batch: int,
        on_event: Callable[[SnapshotEvent], None] | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> Snapshots:
        """As the operator and torchrun have set it up (docs/contracts.md section 2). Raises UserError naming what is
        missing.
        """
        identity = Identity(
            job=_setting(environ, "DDPJOB_NAME"),
            uid=_setting(environ, "DDPJOB_UID"),
            created=_whole(environ, "DDPJOB_CREATED"),
            attempt=_whole(environ, "DDPJOB_ATTEMPT"),
            rank=_whole(environ, "RANK", "0"),
            world_size=_whole(environ, "WORLD_SIZE", "1"),
            nodes=_whole(environ, "DDPJOB_NODES", "1"),
        )
        return cls(
            job_directory(Path(_setting(environ, "DDPJOB_SHARED")), identity.job),
            stateful,
            every=Every.parse(_setting(environ, "DDPJOB_SNAPSHOT_EVERY", "100steps")),
            keep=_whole(environ, "DDPJOB_SNAPSHOT_KEEP", "3"),
            identity=identity,
            strategy=strategy,
            global_batch=global_batch,
            on_event=on_event,
        )

    # Resuming

    def resume(self) -> Manifest | None:
        """Claim the volume and load the newest valid snapshot on all ranks; None if there is none. Call once, before the first step.

        Rank 0 decides and tells the others its decision, or its error, so that all go on or all stop. A rank that
        cannot read the same bytes gets them from rank 0. Raises FencedError, IncompatibleSnapshotError, UserError for a
        volume that cannot be written, SnapshotError; the same on every rank.
        """
        files: dict[str, bytearray] = {}
        error: Exception | None = None
        manifest: Manifest | None = None
        if self.identity.rank == 0:
            try:
                self._store = self._claim()
                newest = self._store.load_newest(read_files)
                if newest is not None:
                    manifest, files = newest
                for info in self._store.set_aside:
                    self._tell(
                        SnapshotEvent(
                            "set_aside", info.step, f"snapshot of step {info.step} is not used: {info.problem}"
                        )
                    )
            except Exception as problem:
                error = problem
        decision = self._ranks.from_first(_decision(manifest, error) if self.identity.rank == 0 else None)
        if error is not None:
            raise error
        manifest = _decided(decision)
        if manifest is not None:
            self._share(manifest, files)
            self._load(manifest, files)
            self.last_saved = manifest
            self._staged_step = manifest.step
            self._tell(SnapshotEvent("resumed", manifest.step, _resumed(manifest), manifest))
        self._start_clock(manifest.step if manifest else 0)
        return manifest

    def _claim(self) -> SnapshotStore:
        who = self.identity
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            fence = Fence.claim(
                self.directory,
                created=who.created,
                attempt=who.attempt,
                uid=who.uid,
                world_size=who.world_size,
                nodes=who.nodes,
            )
        except PermissionError as error:
            raise UserError(f"{self.directory} cannot be written ({error}): mount the volume for this user") from error
        except OSError as error:
            kind = UserError if error.errno == 30 else SnapshotError
            raise kind(
                f"{self.directory} could not be claimed: {error}. Check that the volume is writable and not full"
            ) from error
        return SnapshotStore(self.directory, keep=self._keep, fence=fence)

    def _share(self, manifest: Manifest, files: dict[str, bytearray]) -> None:
        """Have the verified files on every rank: each reads them for itself, and gets from rank 0 what it could not."""
        problem = None
        if self.identity.rank != 0:
            try:
                files.update(read_files(self.directory / step_directory(manifest.step), manifest))
            except (OSError, CorruptSnapshotError) as error:
                problem = str(error)
        lacking = [rank for rank, text in enumerate(self._ranks.problems(problem)) if text is not None]
        if not lacking:
            return
        log.warning(
            "ranks %s cannot read snapshot %d as rank 0 does; rank 0 sends it (here: %s)",
            lacking,
            manifest.step,
            problem,
        )
        for name, entry in manifest.files.items():
            data = files.get(name, bytearray(entry.bytes)) if problem is None else bytearray(entry.bytes)
            self._ranks.bytes_from_first(data)
            files[name] = data

    def _load(self, manifest: Manifest, files: dict[str, bytearray]) -> None:
        problem = None
        try:
            states = parse_files(files)
            generators = states.pop(RNG)["ranks"]
            self._load_states(states)
            self._load_generators(manifest, generators)
        except Exception as error:
            problem = str(error) or type(error).__name__
        for rank, text in enumerate(self._ranks.problems(problem)):
            if text is not None:
                raise IncompatibleSnapshotError(
                    f"snapshot of step {manifest.step} in {self.directory} does not fit this program (rank {rank}): {text}. "
                    "Run the program that wrote it, or give the job another name to start over"
                )

    def _load_states(self, states: dict[str, Any]) -> None:
        if states.keys() != self._stateful.keys():
            raise IncompatibleSnapshotError(f"it holds {sorted(states)}, the program has {sorted(self._stateful)}")
        for name, value in self._stateful.items():
            try:
                value.load_state_dict(states.pop(name))
            except Exception as error:
                raise IncompatibleSnapshotError(f"{name}: {error}") from error

    def _load_generators(self, manifest: Manifest, generators: Tensor) -> None:
        who = self.identity
        if len(generators) == who.world_size:
            rng.restore(generators[who.rank])
            return
        rng.reseed(generators[0], step=manifest.step, rank=who.rank, world_size=who.world_size)
        message = (
            f"snapshot of step {manifest.step} is of {len(generators)} ranks, this is {who.world_size}: "
            "random numbers start anew from the snapshot's, so the run is repeatable but not the one it would have been"
        )
        self._tell(SnapshotEvent("reseeded", manifest.step, message, manifest))

    # Saving

    def step_end(self, progress: Progress, *, epoch_end: bool = False) -> None:
        """Say that an optimizer step is done; saves if one is due. Raises FencedError once a newer attempt owns the
        volume.
        """
        self._collect()
        if self.every.is_timed:
            due = self._is_time(progress.step)
        else:
            due = self.every.is_due(step=progress.step, epoch=progress.epoch, epoch_end=epoch_end)
        if due:
            self.save(progress)

    def save(self, progress: Progress, *, kind: Kind = "periodic", wait: bool = False) -> bool:
        """Save now, on all ranks alike. Without `wait`, returns once the states are copied, True if a save is under way.

        With `wait`, every rank returns when rank 0's files are on the disk, True if they are: what must be asked before
        exiting as preempted. A periodic save that finds the one before still being written is skipped and says so; any
        other waits for it. A save that fails says so in an event and raises nothing, except FencedError.
        """
        started = time.monotonic()
        generators = self._ranks.gather(rng.capture())
        error: FencedError | None = None
        saving = True
        if generators is not None:
            try:
                saving = self._save_first(progress, kind, wait, generators, started)
            except FencedError as fenced:
                error, saving = fenced, False
        if wait:
            (outcome,) = self._ranks.numbers_from_first(2 if error else int(saving))
            saving = outcome == 1
            if outcome == 2:
                raise error or FencedError(f"rank 0 found that a newer attempt owns {self.directory}; see its message")
        if error is not None:
            raise error
        return saving

    def close(self) -> None:
        """Wait for the save in flight, if any. Raises nothing: how it ended is in its event and in `last_saved`."""
        if not self._writer.wait(self._save_timeout):
            message = f"the save in flight did not end within {self._save_timeout:.0f} s: the disk hangs"
            self._tell(SnapshotEvent("failed", self._staged_step or 0, message, failures=self._failures + 1))
        try:
            self._collect()
        except FencedError as error:
            log.warning("%s", error)

    def _save_first(self, progress: Progress, kind: Kind, wait: bool, generators: Tensor, started: float) -> bool:
        self._collect()
        if self._store is None:
            raise RuntimeError("resume() has not been called: the volume is not claimed")
        if self._staged_step != progress.step or not (self._writer.busy or self._is_saved(progress.step)):
            if self._writer.busy:
                patience = PATIENCE_SECONDS - self._writer.busy_seconds
                self._writer.wait(max(0.0, patience) if kind == "periodic" else self._save_timeout)
                self._collect()
            if self._writer.busy:
                message = (
                    f"no snapshot of step {progress.step}: that of step {self._staged_step} is still being written after "
                    f"{self._writer.busy_seconds:.1f} s; lower its frequency or look at the volume's speed"
                )
                self._tell(SnapshotEvent("skipped", progress.step, message))
                return False
            if not self._begin(self._store, progress, kind, generators, started):
                return False
        if wait:
            self._writer.wait(self._save_timeout)
            self._collect()
            return self._is_saved(progress.step)
        return True

    def _begin(self, store: SnapshotStore, progress: Progress, kind: Kind, generators: Tensor, started: float) -> bool:
        who = self.identity
        manifest = Manifest(
            job=who.job,
            uid=who.uid,
            attempt=who.attempt,
            step=progress.step,
            epoch=progress.epoch,
            samples=progress.samples,
            world_size=who.world_size,
            strategy=self._strategy,
            global_batch=self._global_batch,
            time=time.time(),
            kind=kind,
        )
        try:
            states = {name: value.state_dict() for name, value in self._stateful.items()}
            staged = self._staging.stage({**states, RNG: {"ranks": generators}})
        except Exception as error:
            self._failed(Outcome(progress.step, 0.0, time.monotonic() - started, error=error))
            return False
        self._staged_step = progress.step
        self._writer.start(
            progress.step,
            time.monotonic() - started,
            lambda: store.save(
                lambda directory: staged.write(directory, store.disk), manifest, expected_bytes=staged.total_bytes
            ),
        )
        return True

    def _collect(self) -> None:
        """Take the outcome of a save that is over and tell it; raises FencedError."""
        outcome = self._writer.take()
        if outcome is None:
            return
        if isinstance(outcome.error, FencedError):
            raise outcome.error
        if outcome.manifest is None:
            self._failed(outcome)
            return
        self._failures = 0
        self.last_saved = outcome.manifest
        interval = self._retime(outcome) if self.every.unit == "auto" else None
        self._tell(
            SnapshotEvent(
                "saved",
                outcome.step,
                f"snapshot of step {outcome.step} saved in {outcome.seconds:.2f} s, training stopped for {outcome.stall_seconds:.3f} s",
                outcome.manifest,
                outcome.stall_seconds,
                outcome.seconds,
                interval=interval,
            )
        )

    def _failed(self, outcome: Outcome) -> None:
        self._failures += 1
        message = str(outcome.error) or type(outcome.error).__name__
        if self._failures >= FAILING_AFTER:
            message = f"SnapshotsFailing: {self._failures} saves in a row have failed, the last with: {message}"
        self._tell(
            SnapshotEvent(
                "failed",
                outcome.step,
                message,
                stall_seconds=outcome.stall_seconds,
                save_seconds=outcome.seconds,
                failures=self._failures,
            )
        )

    def _is_saved(self, step: int) -> bool:
        return self.last_saved is not None and self.last_saved.step == step

    def _tell(self, event: SnapshotEvent) -> None:
        level = logging.INFO if event.result in ("saved", "resumed") else logging.WARNING
        log.log(level, "%s", event.message)
        if self._on_event is not None:
            self._on_event(event)

    # Timed intervals

    def _start_clock(self, step: int) -> None:
        if self.every.is_timed:
            self._timetable = Timetable(float(self.every.count), step=step, now=time.monotonic())
            self._next_look = step + 1

    def _is_time(self, step: int) -> bool:
        if self._timetable is None or self._next_look is None:
            raise RuntimeError("resume() has not been called: ranks have not agreed on a clock")
        if step < self._next_look:
            return False
        due, next_look = self._timetable.look(step=step, now=time.monotonic())
        due_, self._next_look = self._ranks.numbers_from_first(int(due), next_look)
        return bool(due_)

    def _retime(self, outcome: Outcome) -> Interval:
        """Choose the interval anew from what the save just cost and from the attempts this job has needed so far."""
        attempts = history(self.directory)
        times = [attempt.time for attempt in attempts if attempt.time is not None]
        interval = choose(
            stall_seconds=outcome.stall_seconds,
            save_seconds=outcome.seconds,
            nodes=self.identity.nodes,
            observed_seconds=max(0.0, time.time() - min(times)) if times else 0.0,
            failures=max(0, len(attempts) - 1),
        )
        if self._timetable is not None:
            self._timetable.seconds = interval.seconds
        return interval


def _unwrap(value: Stateful) -> Stateful:
    while True:
        if isinstance(value, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            value = value.module
        elif isinstance(inner := getattr(value, "_orig_mod", None), torch.nn.Module):
            value = inner
        else:
            return value


def _decision(manifest: Manifest | None, error: Exception | None) -> dict[str, Any]:
    if error is not None:
        kinds = {"fenced": FencedError, "incompatible": IncompatibleSnapshotError, "user": UserError}
        kind = next((name for name, type_ in kinds.items() if isinstance(error, type_)), "other")
        return {"error": kind, "message": str(error) or type(error).__name__}
    return {"manifest": manifest.to_json().decode() if manifest else None}


def _decided(decision: dict[str, Any]) -> Manifest | None:
    """Rank 0's decision, or its error raised here too."""
    if "error" in decision:
        kinds = {"fenced": FencedError, "incompatible": IncompatibleSnapshotError, "user": UserError}
        raise kinds.get(decision["error"], SnapshotError)(decision["message"])
    text = decision["manifest"]
    return Manifest.from_json(text.encode()) if text is not None else None


def _resumed(manifest: Manifest) -> str:
    return f"resumed from step {manifest.step} (epoch {manifest.epoch}, {manifest.samples} samples), saved by attempt {manifest.attempt}"


def _setting(environ: Mapping[str, str], name: str, default: str | None = None) -> str:
    value = environ.get(name, default)
    if not value:
        raise UserError(f"{name} is not set: start the script with `ddpjob run` or from a DDPJob, or set it")
    return value


def _whole(environ: Mapping[str, str], name: str, default: str | None = None) -> int:
    value = _setting(environ, name, default)
    if not value.isdecimal():
        raise UserError(f"{name} is {value!r}, not a whole number")
    return int(value)
