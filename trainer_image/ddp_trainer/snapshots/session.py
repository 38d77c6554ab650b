"""Snapshots as a training loop uses them: resume once, say when a step is done, close at the end.

    states = {"model": model, "optimizer": optimizer, "cursor": cursor}
    snapshots = Snapshots.of_job(states, job, world, strategy="ddp", global_batch=64)
    resumed = snapshots.resume()
    ...                                                      # each step:
    snapshots.step_end(Progress(step, epoch, samples))
    ...                                                      # in `except Exception as error:` around the steps
    snapshots.emergency(error)
    ...                                                      # at the end
    snapshots.save(Progress(step, epoch, samples), kind="final", wait=True)
    snapshots.close()

Every rank makes the same calls. Rank 0 owns the volume: it acquires the fence, chooses what to resume from, writes, and
tells the others. Training stops only while states are copied into buffers.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ddp_trainer.contract.environment import JobEnvironment
from ddp_trainer.contract.exit_codes import FencedError, UserError
from ddp_trainer.snapshots import resuming
from ddp_trainer.snapshots.boundary import Boundaries, NoneHasDrawn
from ddp_trainer.snapshots.codec.state import RNG, Stateful, unwrapped
from ddp_trainer.snapshots.per_rank import PerRank
from ddp_trainer.snapshots.ranks import Ranks, ShardRanks
from ddp_trainer.snapshots.saving import GENERATORS_TIMEOUT, Saver
from ddp_trainer.snapshots.schedule import SaveInterval, SaveSchedule
from ddp_trainer.snapshots.trust.errors import SnapshotError
from ddp_trainer.snapshots.trust.manifest import Kind, Manifest
from ddp_trainer.snapshots.trust.names import job_directory, step_directory
from ddp_trainer.snapshots.values import Identity, Progress, SnapshotEvent

if TYPE_CHECKING:
    from ddp_trainer.rank.world import World
    from ddp_trainer.snapshots.sharded import Shards
    from ddp_trainer.snapshots.trust.fence import Fence
    from ddp_trainer.snapshots.trust.store import SnapshotStore

__all__ = ["Identity", "Manifest", "Progress", "SaveInterval", "SnapshotEvent", "Snapshots", "Stateful"]

log = logging.getLogger(__name__)

SAVE_TIMEOUT_SECONDS = 600.0
"""How long a wait for a save may take before the disk is taken for hung; longer for many bytes (`saving`)."""


class Snapshots:
    """Saves and restores `stateful` (name -> object) in `directory`, the job's own (`names.job_directory`).

    A model wrapped by DistributedDataParallel, DataParallel or torch.compile is saved as the model inside, so that it
    can be resumed under another strategy and exported. `sharded` names the states that no rank holds whole, `per_rank`
    small ones of which each rank has its own, `changes_with_optimizer` those, besides modules, optimizers and
    schedulers, that change only between `begin_update` and `step_end`, as a data cursor does that moves on at the end
    of a step. `config` and what `loss_is_finite` says when a save begins are noted in the manifest; it may raise
    instead, the same on all ranks. `check_view` is that of `Fence`.
    """

    def __init__(
        self,
        directory: Path,
        stateful: Mapping[str, Stateful],
        *,
        every: SaveInterval,
        keep: int,
        identity: Identity,
        strategy: str,
        global_batch: int,
        on_event: Callable[[SnapshotEvent], None] | None = None,
        save_timeout: float = SAVE_TIMEOUT_SECONDS,
        sharded: Collection[str] = (),
        per_rank: Collection[str] = (),
        changes_with_optimizer: Collection[str] = (),
        keep_every: int | None = None,
        config: Mapping[str, Any] | None = None,
        loss_is_finite: Callable[[], bool] = lambda: True,
        check_view: Callable[[], None] | None = None,
        shard_ranks: ShardRanks | None = None,
    ) -> None:
        if RNG in stateful:
            raise UserError(
                f"a state may not be called {RNG!r}: the random number generators are saved under that name"
            )
        self.directory = directory
        self.identity = identity
        inner = {name: unwrapped(value) for name, value in stateful.items()}
        self._ranks = Ranks(identity.rank, identity.world_size)
        self._per_rank = {name: PerRank(name, inner[name], self._ranks) for name in per_rank}
        self._stateful = {name: value for name, value in {**inner, **self._per_rank}.items() if name not in sharded}
        self._problem: str | None = None
        self._keep = keep
        self._keep_every = keep_every
        self._config = config
        self._loss_is_finite = loss_is_finite
        self._check_view = check_view
        self._strategy = strategy
        self._global_batch = global_batch
        self._on_event = on_event
        self._save_timeout = save_timeout
        self._shards: Shards | None = None
        if sharded:
            # Imported here: it takes seconds, and most programs need none of it.
            from ddp_trainer.snapshots.sharded import Shards

            parts = {name: inner[name] for name in sharded}
            self._shards = Shards(parts, self._ranks, timeout=save_timeout, shard_ranks=shard_ranks)
        self._boundaries = Boundaries(self._stateful, self._ranks, changes_with_optimizer=changes_with_optimizer)
        if sharded:
            self._boundaries.obstacle = "each rank holds a part of the model, and they cannot meet any more to save it"
        elif per_rank:
            name = min(per_rank)
            self._boundaries.obstacle = f"each rank has a {name} of its own, and they cannot meet any more to save it"
        self._generators: Tensor | None = None
        """Of this rank, from `has_drawn` to the end of the step."""
        self._saver: Saver | None = None
        self._store: SnapshotStore | None = None
        self._schedule = SaveSchedule(every, self._ranks, directory, nodes=identity.nodes, uid=identity.uid)

    @classmethod
    def of_job(
        cls,
        stateful: Mapping[str, Stateful],
        job: JobEnvironment,
        world: World,
        *,
        strategy: str,
        global_batch: int,
        on_event: Callable[[SnapshotEvent], None] | None = None,
        sharded: Collection[str] = (),
        per_rank: Collection[str] = (),
        changes_with_optimizer: Collection[str] = (),
        config: Mapping[str, Any] | None = None,
        loss_is_finite: Callable[[], bool] = lambda: True,
        check_view: Callable[[], None] | None = None,
        shard_ranks: ShardRanks | None = None,
    ) -> Snapshots:
        """Where and as often as `job` says. Raises UserError for a job name or an interval that is none."""
        return cls(
            job_directory(job.shared, job.name),
            stateful,
            every=SaveInterval.parse(job.snapshot_every),
            keep=job.snapshot_keep,
            identity=Identity.of_job(job, world),
            strategy=strategy,
            global_batch=global_batch,
            on_event=on_event,
            sharded=sharded,
            per_rank=per_rank,
            changes_with_optimizer=changes_with_optimizer,
            keep_every=job.snapshot_keep_every,
            config=config,
            loss_is_finite=loss_is_finite,
            check_view=check_view,
            shard_ranks=shard_ranks,
        )

    @property
    def fence(self) -> Fence | None:
        """On rank 0, after `resume`."""
        return self._store.fence if self._store is not None else None

    @property
    def last_saved(self) -> Manifest | None:
        """The newest snapshot known to be whole: the one resumed from, or on rank 0 the last one saved since."""
        return self._saver.last_saved if self._saver is not None else None

    def resume(self, beat: Callable[[], None] = lambda: None) -> Manifest | None:
        """Acquire the fence and load the newest valid snapshot on all ranks; None if there is none. Call it once,
        first.

        Rank 0 decides; all ranks go on or all stop, and `beat` as it reads on. Raises, the same on every rank:
        FencedError, IncompatibleSnapshotError for an intact snapshot of another program, UserError for a volume that
        cannot be written and for a state that not every rank has, SnapshotError.
        """
        noted = self._boundaries
        noted.obstacle = resuming.agreed_obstacle(self._stateful, noted.obstacle, self._ranks)
        store, found = resuming.find_newest(
            self.directory,
            self.identity,
            self._ranks,
            keep=self._keep,
            keep_every=self._keep_every,
            check_view=self._check_view,
            beat=beat,
        )
        self._store = store
        for info in store.set_aside if store is not None else ():
            self._emit(
                SnapshotEvent("set_aside", info.step, f"snapshot of step {info.step} is not used: {info.problem}")
            )
        for info in store.unreadable if store is not None else ():
            self._emit(resuming.passed_over("snapshot", info))
        if found is not None:
            manifest, files = found
            resuming.share(self.directory, manifest, files, self._ranks)
            resuming.check_sharding(self.directory, manifest, strategy=self._strategy, shards=self._shards is not None)
            if self._shards is not None:
                self._shards.load(self.directory / step_directory(manifest.step), manifest)
            resuming.check_owner(store, self._ranks)
            notice = resuming.load(self.directory, manifest, files, self._stateful, self._ranks)
            for text in (notice, *(state.notice for state in self._per_rank.values())):
                if text is not None:
                    self._emit(SnapshotEvent("reseeded", manifest.step, text, manifest))
            self._emit(SnapshotEvent("resumed", manifest.step, resuming.describe(manifest), manifest))
        resumed = found[0] if found is not None else None
        self._saver = Saver(
            self._stateful,
            self._shards,
            self._ranks,
            store,
            self._emit,
            last_saved=resumed,
            timeout=self._save_timeout,
        )
        self._schedule.start(resumed.step if resumed else 0)
        return resumed

    def of_all_ranks(self, value: Any) -> list[Any]:
        """Each rank's `value`, which JSON can hold, by rank: a collective."""
        return self._ranks.values(value)

    def join(self, world: World) -> None:
        """The ranks are those of another process group; before `resume` or `go_on`."""
        self.identity = replace(self.identity, rank=world.rank, world_size=world.size)
        self._ranks.regroup(world.rank, world.size)
        self._boundaries.forget()

    def go_on(self, progress: Progress) -> None:
        """In place of `resume`, where all ranks have the states after `progress.step`. Reads no snapshot.

        Raises FencedError on all ranks if a newer attempt has taken over.
        """
        store, error = self._store, None
        world = self._ranks
        if world.rank == 0 and store is None:
            try:
                store = resuming.acquire(
                    self.directory,
                    self.identity,
                    keep=self._keep,
                    keep_every=self._keep_every,
                    check_view=self._check_view,
                )
            except Exception as problem:
                error = problem
        resuming.decided_by_first(self._ranks, None, error)
        if self._saver is None:
            self._saver = Saver(
                self._stateful,
                self._shards,
                self._ranks,
                store,
                self._emit,
                last_saved=None,
                timeout=self._save_timeout,
            )
        self._store = store if world.rank == 0 else None
        self._saver.lead(self._store)
        self._schedule.go_on(progress.step)

    def has_drawn(self) -> bool:
        """At the end of a step, before `step_end`: whether this rank may have drawn random numbers in it."""
        if self._boundaries.obstacle is not None:
            return True
        self._generators = self._boundaries.generators()
        return self._boundaries.has_drawn(self._generators)

    def has_other_weights(self, step: int) -> bool:
        """Whether the weights of this rank are shown not to be those after `step`."""
        return self._boundaries.other_weights(step) is not None

    def step_end(
        self,
        progress: Progress,
        *,
        epoch_end: bool = False,
        none_has_drawn: NoneHasDrawn | None = None,
        may_save: bool = True,
    ) -> None:
        """Say that an optimizer step is done; saves if it is time, and it `may_save`. Raises FencedError if fenced.

        `none_has_drawn` is given, on all ranks alike, where none had drawn random numbers in the step before
        (`Boundaries.reached`).
        """
        generators, self._generators = self._generators, None
        if self._saver is not None:
            self._saver.collect()
        self._boundaries.step_ended(progress.step)
        if may_save and self._schedule.after(progress, epoch_end=epoch_end):
            self.save(progress)
        elif self._boundaries.obstacle is None:
            self._boundaries.reached(progress, none_has_drawn, generators)

    def begin_update(self) -> None:
        """Say that states are about to change. Optimizers among the states say so themselves; call it where something
        else changes first or alone, as a gradient scaler does that skips a step.
        """
        self._boundaries.begin_update()

    def generators_at_boundary(self) -> Tensor | None:
        """This rank's, as `rng.capture` has them, when the last step ended; None before the first of a group, and where
        not each end of a step is noted.
        """
        boundary = self._boundaries.newest
        return None if boundary is None or self._boundaries.obstacle is not None else boundary.own_generators

    def await_others(self) -> None:
        """Wait, some seconds at most, until the generators of all ranks at the last boundary are on rank 0."""
        if (boundary := self._boundaries.newest) is not None:
            with contextlib.suppress(RuntimeError, SnapshotError):  # which `emergency` has once more
                boundary.generators.wait(GENERATORS_TIMEOUT)

    def emergency(self, error: BaseException) -> bool:
        """After an exception that ends training: save the last finished step, if the states are still those of it.

        Raises nothing. True on rank 0 if the last finished step is saved; where it cannot be, an event says why. Takes
        up to a minute if the volume hangs. The other ranks wait, some seconds at most, until rank 0 has what it needs
        of them: gloo sends nothing before rank 0 is at the end of that step, too.
        """
        if self._saver is None or isinstance(error, FencedError):
            return False
        if self._ranks.rank != 0:
            self.await_others()
            return False
        return self._saver.emergency(self._boundaries, lambda progress: self._manifest(progress, "emergency"))

    def save(self, progress: Progress, *, kind: Kind = "periodic", wait: bool = False) -> bool:
        """Save now, on all ranks alike. Without `wait`, returns once states are copied, True if a save is under way.

        With `wait`, every rank returns when rank 0's files are on the disk, True if they are: what must be asked
        before exiting as preempted. A periodic save that finds the one before still being written after
        PATIENCE_SECONDS is skipped and says so; any other waits for it. A save that fails says so in an event and
        raises nothing, except FencedError.
        """
        if self._saver is None:
            raise RuntimeError("call resume() before the first save: it acquires the fence")
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            # the steps that wait in the device's queue are training, and no part of what the save costs it
            torch.cuda.synchronize()
        if kind == "preempted" and (problem := self._other_weights(progress.step)) is not None:
            message = f"no snapshot of step {progress.step}: {problem}. Put them back before run.stop()"
            self._emit(SnapshotEvent("skipped", progress.step, message))
            return False
        started = time.monotonic()
        for state in self._per_rank.values():
            state.gather()
        generators = self._boundaries.reached(progress).generators.wait()
        return self._saver.save(self._manifest(progress, kind), generators, started=started, wait=wait)

    def _other_weights(self, step: int) -> str | None:
        """On all ranks alike: why rank 0 may not save this step now; None if it may, or has done so."""
        problem = None
        if self._saver is not None and self._ranks.rank == 0 and not self._saver.has(step):
            problem = self._boundaries.other_weights(step)
        return self._ranks.problems(problem)[0]

    def problem(self) -> str | None:
        """On all ranks alike: why the last save that failed or was skipped did; None if none did."""
        return self._ranks.problems(self._problem)[0]

    def close(self) -> None:
        """Wait for the save in flight, if any. Raises nothing and needs no other rank; see its event."""
        if self._saver is not None:
            self._saver.close()

    def _manifest(self, progress: Progress, kind: Kind) -> Manifest:
        identity = self.identity
        if self._shards is not None:  # those that have its parts
            identity = replace(identity, world_size=self._shards.size)
        return identity.manifest(
            progress,
            kind,
            strategy=self._strategy,
            global_batch=self._global_batch,
            loss_is_finite=self._loss_is_finite(),
            config=self._config,
        )

    def _emit(self, event: SnapshotEvent) -> None:
        if event.result == "saved":
            event = self._schedule.saved(event)
        if event.result in ("failed", "skipped"):
            self._problem = event.message
        # Python prints warnings where a program sets up no logging; `on_event` prints what rank 0 has to say
        is_printed = self._on_event is not None and (self._ranks.rank == 0 or event.result in ("reseeded", "set_aside"))
        is_warning = event.result not in ("saved", "resumed") and not is_printed
        log.log(logging.WARNING if is_warning else logging.INFO, "%s", event.message)
        if self._on_event is not None:
            self._on_event(event)
