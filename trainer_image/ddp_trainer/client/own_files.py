"""The checkpoints that a program writes itself: when one is due, and the newest that verifies.

Without states of its own to save, a run decides when (`spec.snapshots.every`, and a stop), and the program saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from ddp_trainer.contract.environment import JobEnvironment
from ddp_trainer.rank.world import World
from ddp_trainer.snapshots.checkpoints import Checkpoints
from ddp_trainer.snapshots.ranks import Ranks
from ddp_trainer.snapshots.schedule import SaveInterval, SaveSchedule
from ddp_trainer.snapshots.trust.fence import Fence
from ddp_trainer.snapshots.trust.manifest import Manifest
from ddp_trainer.snapshots.trust.names import job_directory
from ddp_trainer.snapshots.values import Identity, Progress, SnapshotEvent


class OwnFiles:
    """Of one job, on every rank alike. `ranks` agree on when to save; None where the run saves its states itself."""

    def __init__(
        self,
        job: JobEnvironment,
        world: World,
        ranks: Ranks | None,
        *,
        global_batch: int,
        config: Mapping[str, Any] | None,
        report: Callable[[SnapshotEvent], None],
    ) -> None:
        directory = job_directory(job.shared, job.name)
        self.should_save = False
        """Whether the program is to save: from the step at which it is time, until it does."""
        self._schedule: SaveSchedule | None = None
        if ranks is not None:
            every = SaveInterval.parse(job.snapshot_every)
            self._schedule = SaveSchedule(every, ranks, directory, nodes=job.nodes, uid=job.uid)

        def checkpointed(event: SnapshotEvent) -> None:
            chosen = self._schedule.saved(event) if self._schedule and event.result == "saved" else event
            report(replace(chosen, stall_seconds=0.0))  # the phase `save` has that time already

        self._checkpoints = Checkpoints(
            directory,
            keep=job.snapshot_keep,
            identity=Identity.of_job(job, world),
            global_batch=global_batch,
            on_event=checkpointed,
            keep_every=job.snapshot_keep_every,
            config=config,
        )
        self._has_begun = False
        self._found: tuple[tuple[Manifest, Path] | None] | None = None
        """What `latest` or `resume` has verified for the other of the two."""

    @property
    def fence(self) -> Fence | None:
        """What this attempt writes under, once it has written or read."""
        return self._checkpoints.fence

    def resume(self) -> Manifest | None:
        """That of the newest checkpoint, which the program loads; None if there is none."""
        # What `latest` has given: another search may find another one, whose weights the program does not have.
        self._found = self._found or (self._checkpoints.newest(),)
        (newest,) = self._found
        if newest is None:
            return None
        self._checkpoints.resumed(newest[0])
        return newest[0]

    def begins(self, step: int) -> None:
        """The loop begins after `step` steps."""
        self._has_begun = True
        if self._schedule is not None:
            self._schedule.start(step)

    def step_ended(self, progress: Progress, *, epoch_end: bool) -> None:
        """A step has ended: is it time to save?"""
        if self._schedule is not None:
            self.should_save = self._schedule.after(progress, epoch_end=epoch_end) or self.should_save

    def epoch_ended(self, progress: Progress) -> None:
        """The last step was the last one of an epoch, which was not known when it ended: is it time to save?"""
        if self._schedule is not None:
            self.should_save = self._schedule.after(progress, epoch_end=True) or self.should_save

    @contextmanager
    def writing(
        self, progress: Progress, *, kind: Literal["preempted", "periodic"], loss_is_finite: bool
    ) -> Iterator[Path]:
        """A folder that becomes the checkpoint of a step at the end of the block."""
        with self._checkpoints.writing(progress, kind=kind, loss_is_finite=loss_is_finite) as folder:
            yield folder
        self._found = None

    def latest(self) -> Path | None:
        """The newest checkpoint that verifies."""
        (newest,) = self._found or (self._checkpoints.newest(),)
        self._found = None if self._has_begun else (newest,)
        return None if newest is None else newest[1]
