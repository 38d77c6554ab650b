"""`status` of a DDPJob: what is true now, what went wrong, what was saved. Written by the operator alone.

Conditions follow the Kubernetes API conventions (KEP-1623): types are adjectives or past participles, and a condition
keeps its `lastTransitionTime` for as long as its status stays the same.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from ddpjob_operator.api.base import APIModel


class Phase(StrEnum):
    """Where a job is in its life. Succeeded and Failed are final."""

    PENDING = "Pending"
    STARTING = "Starting"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"

    @property
    def final(self) -> bool:
        return self in (Phase.SUCCEEDED, Phase.FAILED)


class Condition(APIModel):
    """One aspect of the job's state (metav1.Condition)."""

    type: Annotated[str, Field(max_length=316)]
    """Suspended, Initialized, Scheduled, Running, Restarting, Degraded, SnapshotsFailing, Complete or Failed."""

    status: Annotated[str, Field(json_schema_extra={"enum": ["True", "False", "Unknown"]})]
    """Whether the condition holds."""

    reason: Annotated[str, Field(max_length=1024)] = ""
    """Why, in one CamelCase word."""

    message: Annotated[str, Field(max_length=32768)] = ""
    """Why, for people."""

    last_transition_time: datetime
    """When `status` last changed."""

    observed_generation: int = 0
    """The generation of the spec that this was said about."""


class NodeCount(APIModel):
    """Pods of the current attempt."""

    ready: int = 0
    """Pods whose containers are ready."""

    total: int = 0
    """Pods that make up the gang."""

    spares: int = 0
    """Pods beyond the gang that run and wait: spares, and nodes that an elastic job may grow into."""

    summary: str = ""
    """`ready/total`, as shown by kubectl get."""


class SnapshotStatus(APIModel):
    """The newest snapshot that training can resume from."""

    step: int
    """The optimizer step it was taken after."""

    time: datetime
    """When it was complete on the volume."""

    verified: bool = False
    """Whether sizes and checksums were read back and found right."""


class Progress(APIModel):
    """How far training has come, as last reported by node rank 0."""

    epoch: int | None = None
    """The epoch in progress, from 0."""

    step: int | None = None
    """Optimizer steps finished."""

    total_steps: int | None = None
    """Optimizer steps that make up the run, if known."""

    loss: float | None = None
    """Mean training loss of the last step over all ranks."""

    samples_per_second: float | None = None
    """Throughput of the whole gang."""

    eta: datetime | None = None
    """When training is expected to end."""

    metrics: dict[str, float] | None = None
    """Evaluation metrics, such as eval_accuracy."""


class FailureStatus(APIModel):
    """What ended the last attempt that failed."""

    attempt: int
    """The attempt that it ended."""

    time: datetime
    """When the operator learnt of it."""

    node_rank: int | None = None
    """The pod of the gang that failed first."""

    rank: int | None = None
    """The rank that failed first, if it is known."""

    pod_name: str | None = None
    """Name of that pod."""

    node_name: str | None = None
    """The Kubernetes node that it ran on."""

    exit_code: int | None = None
    """Exit code of its trainer container."""

    reason: str
    """The cause in one word, such as WorkerKilled, OOMKilled, PodDeleted, ImportError."""

    message: str = ""
    """The cause for people, with the last lines of the traceback if there is one."""

    step: int | None = None
    """The step that training had reached."""

    snapshot_step: int | None = None
    """The step of the newest snapshot at that moment; the steps after it were lost."""

    advice: str = ""
    """What to do about it."""

    signal: str | None = None
    """The signal that ended the trainer, such as SIGKILL."""

    log_tail: str = ""
    """The last lines of the failed pod's log, saved before the pod was deleted."""


class Goodput(APIModel):
    """Where the job's time went, in seconds by cause. They add up to the time since `startTime`."""

    queued: float = 0.0
    """Waiting for nodes: quota, queue, scheduler, and the backoff between restarts."""

    pulling: float = 0.0
    """Scheduled, and its containers not started: image pulls and volumes."""

    initializing: float = 0.0
    """Fetching data sets and models."""

    rendezvous: float = 0.0
    """From the containers' start until the ranks have met and loaded the model."""

    first_step: float = 0.0
    """The first step of an attempt, with warm-up and compilation."""

    training: float = 0.0
    """Steps that were kept."""

    validating: float = 0.0
    """Evaluations."""

    saving: float = 0.0
    """Training stopped for a snapshot."""

    stalled: float = 0.0
    """A rank stood still."""

    recovering: float = 0.0
    """From a failure to the next attempt's containers, and steps that were trained a second time."""

    suspended: float = 0.0
    """Suspended by the user."""

    ratio: float | None = None
    """Share of the time since startTime, suspensions left out, that went into steps that were kept."""

    recomputed_steps: int = 0
    """Steps that were lost with a failure and trained again."""

    cause: str = ""
    """What the time goes into now: the name of one of the fields above."""

    counted_until: datetime | None = None
    """When the seconds above were last added up."""

    told: dict[str, float] = Field(default_factory=dict)
    """What the trainer has told of the current attempt so far, in seconds by cause; contained in the fields above."""


class DDPJobStatus(APIModel):
    """What the operator knows of the job."""

    phase: Phase | None = None
    """Pending, Starting, Running, Restarting, Suspended, Succeeded or Failed."""

    conditions: tuple[Condition, ...] = ()
    """Suspended, Initialized, Scheduled, Running, Restarting, Degraded, SnapshotsFailing, Complete, Failed."""

    attempt: int = 0
    """The current attempt, counted from 0. A pod's name carries it."""

    restarts: int = 0
    """Restarts after failures since the job began."""

    restarts_since_progress: int = 0
    """Restarts in a row without a newer snapshot. They count against restart.maxRestarts and lengthen the backoff."""

    restart_times: tuple[datetime, ...] = ()
    """With restart.windowSeconds: when the counted restarts of the window were."""

    disruptions: int = 0
    """Restarts that do not count: evictions, preemptions, changes of size, gangs that did not get all their nodes, and
    failures that a rule marks RestartFree.
    """

    disruptions_since_progress: int = 0
    """Consecutive disruptions without a newer snapshot: they lengthen the backoff, and do not use the budget."""

    restart_at: datetime | None = None
    """While Restarting: when the next attempt starts."""

    retry_at: datetime | None = None
    """While the job waits for what it could not get, all its nodes or its data: when it tries again."""

    initializer_failures: int = 0
    """Tries of the initializers that failed."""

    attempt_time: datetime | None = None
    """When the current attempt was decided on."""

    nodes: NodeCount = NodeCount()
    """Pods of the current attempt."""

    kept_pods: Annotated[dict[str, int], Field(max_length=2048)] = Field(default_factory=dict)
    """With restart.scope InPlace: pods that live on from earlier attempts, and their node ranks in the current one, -1
    where they go on waiting for one. The others were made for it.
    """

    progress: Progress | None = None
    """How far training has come."""

    snapshot: SnapshotStatus | None = None
    """The newest snapshot."""

    last_failure: FailureStatus | None = None
    """What ended the last attempt that failed. Kept after the pods are gone."""

    failures: tuple[FailureStatus, ...] = ()
    """The last few failures, newest last, their messages shortened."""

    node_failures: dict[str, int] = Field(default_factory=dict)
    """Failures of this job on each node; a node that reaches restart.excludeNodeAfter is avoided."""

    excluded_nodes: tuple[str, ...] = ()
    """Nodes that new pods of this job keep away from."""

    corrupt_snapshots: tuple[str, ...] = ()
    """Snapshots on the volume that did not verify and were set aside, and why."""

    goodput: Goodput | None = None
    """Where the job's time went."""

    selector: str | None = None
    """The pods of the job as a label selector, for the scale subresource."""

    spec_digests: dict[str, str] | None = None
    """A digest of each spec field that must not change while the job runs, as the current attempt was started with."""

    observed_generation: int | None = None
    """The generation of the spec that this status is about."""

    start_time: datetime | None = None
    """When the operator first acted on the job."""

    suspended_seconds: float = 0.0
    """How long the job was suspended in all, a suspension that still lasts left out. It does not count against
    activeDeadlineSeconds.
    """

    completion_time: datetime | None = None
    """When the job became Succeeded or Failed."""

    @property
    def is_final(self) -> bool:
        """Whether the job is over, for better or worse."""
        return self.phase is not None and self.phase.final
