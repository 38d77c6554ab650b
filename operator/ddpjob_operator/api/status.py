"""`status` of a DDPJob. Only the operator writes it.

Conditions follow the Kubernetes API conventions (KEP-1623): types are adjectives or past participles, and a condition
keeps its `lastTransitionTime` for as long as its status stays the same.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import AwareDatetime, ConfigDict, Field

from ddpjob_operator.api.base import APIModel


class Phase(StrEnum):
    """The state of a job. Succeeded and Failed are final."""

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
    """A condition of the job (metav1.Condition)."""

    type: Annotated[str, Field(max_length=316)]
    """Type: Suspended, Initialized, Scheduled, Running, Restarting, Degraded, SnapshotsFailing,
    LossNotFinite, ShutdownTooShort, Complete or Failed.
    """

    status: Annotated[str, Field(json_schema_extra={"enum": ["True", "False", "Unknown"]})]
    """True, False or Unknown."""

    reason: Annotated[str, Field(max_length=1024)] = ""
    """Reason of the last transition, one CamelCase word. docs/conditions.md lists all reasons."""

    message: Annotated[str, Field(max_length=32768)] = ""
    """Details of the last transition, for humans."""

    last_transition_time: AwareDatetime
    """Time of the last change of `status`."""

    observed_generation: int = 0
    """metadata.generation that the condition was set for."""


class NodeCount(APIModel):
    """Numbers of pods of the current attempt."""

    ready: int = 0
    """Number of ready pods."""

    total: int = 0
    """Number of pods that the attempt needs."""

    spares: int = 0
    """Number of running standby pods: spares, and pods with which an elastic job may grow."""


class SnapshotStatus(APIModel):
    """Newest snapshot that training can resume from."""

    step: int
    """Number of optimizer steps in the snapshot."""

    time: AwareDatetime
    """When the snapshot was complete on the volume."""

    verified: bool = False
    """Whether sizes and checksums have been verified by reading the snapshot back."""


class Progress(APIModel):
    """Training progress, as last reported by node rank 0."""

    epoch: int | None = None
    """Current epoch, from 0."""

    step: int | None = None
    """Completed optimizer steps."""

    total_steps: int | None = None
    """Total number of optimizer steps of the run, if known."""

    loss: float | None = None
    """Training loss of the last reported step, or of the one before while it trains, averaged over all ranks."""

    samples_per_second: float | None = None
    """Training throughput of all ranks together."""

    eta: AwareDatetime | None = None
    """Estimated time at which training ends."""

    remaining_seconds: int | None = None
    """Estimated seconds until training ends, at the time of the report."""

    metrics: dict[str, float] | None = None
    """Evaluation metrics, such as eval_accuracy."""


class FailureStatus(APIModel):
    """A failure that ended an attempt."""

    attempt: int
    """Number of the attempt that failed."""

    time: AwareDatetime
    """When the operator detected the failure."""

    node_rank: int | None = None
    """Node rank of the pod that failed first."""

    rank: int | None = None
    """Rank that failed first, if known."""

    pod_name: str | None = None
    """Name of the pod that failed first."""

    node_name: str | None = None
    """Kubernetes node of that pod."""

    exit_code: int | None = None
    """Exit code of the trainer container of that pod."""

    reason: str
    """Cause in one CamelCase word, such as WorkerKilled, OOMKilled or NodeLost. docs/conditions.md lists all."""

    message: str = ""
    """Cause for humans, with the end of the traceback if there is one."""

    step: int | None = None
    """Step at the time of the failure."""

    snapshot_step: int | None = None
    """Step of the newest snapshot at that time. Later steps were lost."""

    advice: str = ""
    """Suggested action."""

    signal: str | None = None
    """Signal that terminated the trainer, such as SIGKILL."""

    log_tail: str = ""
    """Last lines of the failed pod's log, saved before the pod was deleted. Secrets are masked."""


class Goodput(APIModel):
    """Wall-clock time of the job by activity, in seconds. The activities add up to the time since `startTime`."""

    model_config = ConfigDict(allow_inf_nan=False)

    queued: float = 0.0
    """Waiting for nodes: quota, queue, scheduler, and restart backoff."""

    pulling: float = 0.0
    """Scheduled, but containers not started yet: image pulls and volume mounts."""

    initializing: float = 0.0
    """Running initializers."""

    rendezvous: float = 0.0
    """From the start of the containers until all ranks have joined the process group and loaded the model."""

    first_step: float = 0.0
    """First step of each attempt, including warm-up and compilation."""

    training: float = 0.0
    """Training steps that were not lost."""

    validating: float = 0.0
    """Evaluation."""

    saving: float = 0.0
    """Training blocked by saving a snapshot."""

    stalled: float = 0.0
    """A rank made no progress until stall detection killed it."""

    recovering: float = 0.0
    """From a failure to the containers of the next attempt, and steps that were lost with the failure."""

    suspended: float = 0.0
    """Suspended."""

    unknown: float = 0.0
    """A script ran of which no training step was seen yet, or it had returned and its pods were still at work."""

    ratio: float | None = None
    """Goodput: training seconds divided by all seconds except suspended ones, from 0 to 1. Unset if no training step
    can be seen.
    """

    recomputed_steps: int = 0
    """Steps that were lost with failures and had to be trained again."""

    activity: str = ""
    """Current activity: the name of one of the fields above, but `first_step` for firstStep."""

    last_update_time: AwareDatetime | None = None
    """When the seconds above were last updated."""


class UnresolvedSteps(APIModel):
    """Steps of an attempt that has ended, until it is known from which of them the next one resumes."""

    first: int
    """The step that the attempt resumed from, 0 for none."""

    last: int
    """The last step that it completed."""

    training: float
    """Seconds that they took, as they are in goodput.training."""


class Notification(StrEnum):
    """What is on record of the notification of a job's end."""

    PENDING = "Pending"
    DELIVERED = "Delivered"
    FAILED = "Failed"


class Internal(APIModel):
    """Internal state of the operator. Not part of the API: any version may change it."""

    spec_digests: dict[str, str] | None = None
    """Digests of the immutable spec fields that the current attempt was started with."""

    kept_pods: Annotated[dict[str, int], Field(max_length=2048)] = Field(default_factory=dict)
    """Pods that were made for another place, and their node ranks in the current attempt (-1 for a spare): with
    restart.scope InPlace those of earlier attempts that are reused, with Live also spares in the place of lost pods.
    """

    succeeded_nodes: Annotated[tuple[int, ...], Field(max_length=2048)] = ()
    """Node ranks of the current attempt that succeeded and whose pods were deleted before the job was over."""

    avoided_nodes: Annotated[tuple[str, ...], Field(max_length=64)] = ()
    """Nodes that pods of the current attempt are kept away from because they confirmed no deletion when the pods were
    created.
    """

    rule_excluded_nodes: Annotated[tuple[str, ...], Field(max_length=64)] = ()
    """Those of excludedNodes that a rule with ExcludeNode excluded, for good."""

    node_names_refused: bool | None = None
    """Whether an autoscaler adds no node for pods that exclude nodes by name. They only prefer others since then."""

    lost_pods: Annotated[dict[str, int], Field(max_length=2048)] = Field(default_factory=dict)
    """With restart.scope Live: uids of pods of the current attempt that were lost and are replaced, and their node
    ranks.
    """

    initializer_disruptions: int | None = None
    """Number of initializer pods that the cluster ended. They do not count as failed, but their names are used."""

    refunded_restarts: int | None = None
    """Number of restarts that were refunded since the job began."""

    reported_seconds: dict[str, float] = Field(default_factory=dict)
    """Seconds reported by the trainer in this attempt, by activity. They are included in goodput."""

    node_seconds: dict[str, float] = Field(default_factory=dict)
    """Pod-seconds by activity, since the job began: goodput, weighted with the size of the gang."""

    gpu_seconds: dict[str, float] = Field(default_factory=dict)
    """GPU-seconds, likewise."""

    unresolved_steps: UnresolvedSteps | None = None
    """What the attempt before has trained, while it is not known how much of it is lost."""

    notification: Notification | None = None
    """Notification of the job's end: Pending since the phase is final, then Delivered or Failed. Unset for jobs that
    end while notifications are off."""


class Summary(APIModel):
    """Columns of `kubectl get`, derived from the other fields of the status."""

    nodes: str | None = None
    """Ready and needed pods, such as `2/2`."""

    progress: str | None = None
    """Completed and total steps, such as `412/1000`, or `412` if the total is unknown."""

    eta: str | None = None
    """While Running: estimated time until training ends, such as `3m20s`."""

    reason: str | None = None
    """Reason of the condition that explains the phase."""


class DDPJobStatus(APIModel):
    """Observed state of the job."""

    phase: Phase | None = None
    """Pending, Starting, Running, Restarting, Suspended, Succeeded or Failed."""

    summary: Summary | None = None
    """Columns of `kubectl get`."""

    conditions: tuple[Condition, ...] = ()
    """Conditions of the types Suspended, Initialized, Scheduled, Running, Restarting, Degraded, SnapshotsFailing,
    LossNotFinite, ShutdownTooShort, Complete and Failed. docs/conditions.md lists their reasons.
    """

    attempt: int = 0
    """Number of the current attempt, from 0. It is part of the pod names."""

    code_digest: str | None = None
    """SHA-256 digest of the code that the current attempt runs: `spec.code.sha256`. Its snapshots have it too."""

    restarts: int = 0
    """Number of restarts after failures."""

    live_recoveries: int | None = None
    """Number of times that pods were lost and replaced while the others went on (restart.scope Live). Each is also
    counted in restarts (failures) or in disruptions (evictions, drains, lost nodes); only the former count towards
    maxRestarts.
    """

    restarts_since_progress: int = 0
    """Number of consecutive restarts without a new snapshot. Limited by restart.maxRestarts; increases the backoff."""

    restart_times: tuple[AwareDatetime, ...] = ()
    """Times of the restarts within restart.windowSeconds, if that is set."""

    disruptions: int = 0
    """Number of restarts that do not count towards maxRestarts: evictions, preemptions, changes of the number of
    nodes, and failures that match a RestartAndIgnoreMaxRestarts rule.
    """

    disruptions_since_progress: int = 0
    """Number of consecutive disruptions, and of gangs that were released because they could not be completed, without a
    new snapshot. Increases the backoff.
    """

    restart_at: AwareDatetime | None = None
    """When the attempt starts, or started, where it had to wait for a backoff."""

    retry_at: AwareDatetime | None = None
    """When the operator retries an incomplete gang or a failed initializer."""

    initializer_failures: int = 0
    """Number of failed initializer pods, without those that an eviction or another disruption ended."""

    attempt_start_time: AwareDatetime | None = None
    """When the current attempt began."""

    nodes: NodeCount = NodeCount()
    """Numbers of pods of the current attempt."""

    progress: Progress | None = None
    """Training progress."""

    snapshot: SnapshotStatus | None = None
    """Newest snapshot."""

    last_failure: FailureStatus | None = None
    """The last failure. It is kept after the pods are deleted."""

    failures: tuple[FailureStatus, ...] = ()
    """The last five failures, newest last, with shortened messages."""

    node_failures: dict[str, int] = Field(default_factory=dict)
    """Number of failures that a node may have caused, by node (restart.excludeNodeAfter). A node is forgotten a day
    after the last.
    """

    node_failure_times: dict[str, AwareDatetime] = Field(default_factory=dict)
    """Time of the last failure of each of these nodes."""

    excluded_nodes: tuple[str, ...] = ()
    """Nodes that the job does not use: until a day after their last failure, those of a rule for good. With Karpenter,
    which adds no node for pods that exclude some, the job prefers others.
    """

    corrupt_snapshots: tuple[str, ...] = ()
    """Snapshots that failed verification and were set aside, with the reason."""

    goodput: Goodput | None = None
    """Wall-clock time of the job by activity."""

    selector: str | None = None
    """Label selector of the job's pods, for the scale subresource."""

    observed_generation: int | None = None
    """metadata.generation that the operator last acted on."""

    start_time: AwareDatetime | None = None
    """When the operator first acted on the job. Not changed by restarts."""

    suspended_seconds: float = 0.0
    """Total seconds of past suspensions. They do not count towards activeDeadlineSeconds."""

    completion_time: AwareDatetime | None = None
    """When the job succeeded or failed."""

    internal: Internal = Internal()
    """Internal state of the operator. Not part of the API: any version may change it."""

    @property
    def is_final(self) -> bool:
        """Whether the phase is Succeeded or Failed."""
        return self.phase is not None and self.phase.final

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # IPython's, of a cell's result: `repr` is a page
        printer.text(f"<DDPJobStatus: {self.phase or 'new'}, attempt {self.attempt}, restarts {self.restarts}>")
