"""The values that a training loop and its snapshots exchange."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ddp_trainer.contract.environment import JobEnvironment
from ddp_trainer.snapshots.trust.manifest import Kind, Manifest

if TYPE_CHECKING:
    from ddp_trainer.rank.world import World

FAILING_AFTER = 3
"""So many saves failed in a row are no accident: SnapshotsFailing."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The job, attempt and rank of this process. `created` is the job's creation time in whole seconds.

    `code_sha256` is the digest of the submitted code, None without. `begins_anew`: snapshots of earlier jobs of the
    same name are not resumed from.
    """

    job: str
    uid: str
    created: int
    attempt: int
    rank: int
    world_size: int
    nodes: int = 1
    code_sha256: str | None = None
    begins_anew: bool = False

    @classmethod
    def of_job(cls, job: JobEnvironment, world: World) -> Identity:
        return cls(
            job.name,
            job.uid,
            job.created,
            job.attempt,
            world.rank,
            world.size,
            job.nodes,
            code_sha256=job.code_sha256,
            begins_anew=job.snapshot_resume == "Own",
        )

    def manifest(
        self,
        progress: Progress,
        kind: Kind,
        *,
        strategy: str,
        global_batch: int,
        loss_is_finite: bool = True,
        config: Mapping[str, Any] | None = None,
    ) -> Manifest:
        """Of a snapshot that this attempt begins now, without its files."""
        return Manifest(
            job=self.job,
            uid=self.uid,
            attempt=self.attempt,
            step=progress.step,
            epoch=progress.epoch,
            samples=progress.samples,
            world_size=self.world_size,
            strategy=strategy,
            global_batch=global_batch,
            time=time.time(),
            kind=kind,
            loss_is_finite=loss_is_finite,
            config=config or {},
            code_sha256=self.code_sha256,
        )


@dataclass(frozen=True, slots=True)
class Progress:
    """Where training stands after a step: finished optimizer steps, whole epochs, global samples."""

    step: int
    epoch: int
    samples: int


@dataclass(frozen=True, slots=True)
class ChosenInterval:
    """The chosen interval and what it was chosen from; all in seconds."""

    seconds: float
    mttf_seconds: float
    stall_seconds: float
    save_seconds: float
    failures: int
    bound: str | None
    """Which limit decided instead of Young's formula: `overhead`, `save`, `shortest`, `longest`, or None."""


@dataclass(frozen=True, slots=True)
class SnapshotEvent:
    """Something a person or a metric should know, delivered on the training thread.

    `resumed` and `reseeded` reach every rank, the others rank 0. `failures` counts failed saves in a row;
    FAILING_AFTER of them make SnapshotsFailing. `interval` is what `auto` chose after this save.
    """

    result: Literal["saved", "failed", "skipped", "set_aside", "unreadable", "resumed", "reseeded"]
    step: int
    message: str
    manifest: Manifest | None = None
    stall_seconds: float = 0.0
    save_seconds: float = 0.0
    failures: int = 0
    interval: ChosenInterval | None = None
