"""Parts of `spec` that describe policies: snapshots, elasticity, restarts, stall detection and gang scheduling."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ddpjob_operator.api.base import APIModel
from ddpjob_operator.api.pod import ObjectName

Seconds = Annotated[int, Field(strict=True, ge=0, le=31_536_000)]
PositiveSeconds = Annotated[int, Field(strict=True, ge=1, le=31_536_000)]


class Snapshots(APIModel):
    """When the training state is saved to /mnt/shared/checkpoints/<job>, and how many snapshots are kept."""

    every: Annotated[str, Field(pattern=r"^([1-9][0-9]{0,8}(steps|epochs|seconds)|auto)$")] = "60seconds"
    """Interval between snapshots: a number with the unit `steps`, `epochs` or `seconds`, such as `100steps`. With
    `auto`, the interval is computed from the measured cost of a snapshot and the failure rate (Young's formula).
    """

    keep: Annotated[int, Field(strict=True, ge=1, le=1000)] = 3
    """Number of verified snapshots to keep. Older ones are deleted after a newer one has been verified. Snapshots of
    steps with a NaN or infinite loss are not counted.
    """

    keep_every: Annotated[int, Field(strict=True, ge=1, le=1_000_000_000)] | None = None
    """Also keep, for good, the first snapshot at or after each multiple of this number of steps."""

    resume: Literal["Any", "Own"] = "Any"
    """Which snapshots the job resumes from: the newest of any job of this name on the volume (Any), or only its own
    (Own). With Own, those of an earlier job are moved to checkpoints/<job>/earlier, and removed with the next move.
    Restarts resume in both cases.
    """


class Elastic(APIModel):
    """Run with fewer nodes when not all can be scheduled. `spec.nodes` is the desired number. The global batch size and
    the learning rate do not change with the number of nodes.
    """

    min_nodes: Annotated[int, Field(strict=True, ge=1, le=1024)]
    """Minimum number of nodes to start training with."""

    wait_seconds: Seconds = 30
    """Seconds to wait for missing nodes before training starts without them."""


class Backoff(APIModel):
    """Exponential backoff between restarts without progress. After progress, a restart is immediate."""

    initial_seconds: Annotated[int, Field(strict=True, ge=0, le=3600)] = 1
    """Delay before the first restart without progress; a restart after a new verified snapshot is immediate. The
    delay doubles after each restart without a new snapshot, with a jitter of ±20 %.
    """

    max_seconds: Annotated[int, Field(strict=True, ge=0, le=86400)] = 300
    """Maximum delay."""


class RestartRule(APIModel):
    """A rule that selects failures and decides what happens. All fields that are set must match. The first matching
    rule applies.
    """

    exit_codes: Annotated[tuple[Annotated[int, Field(strict=True, ge=1, le=255)], ...], Field(max_length=64)] = ()
    """Match any of these exit codes of the trainer container."""

    reasons: Annotated[
        tuple[Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9]{0,63}$", max_length=64)], ...], Field(max_length=64)
    ] = ()
    """Match any of these reasons, as in status.lastFailure.reason, such as OOMKilled, Evicted, NodeLost or Stalled."""

    signals: Annotated[
        tuple[Annotated[str, Field(pattern=r"^SIG[A-Z0-9]{2,12}$", max_length=16)], ...], Field(max_length=32)
    ] = ()
    """Match any of these signals that terminated the trainer, such as SIGKILL or SIGSEGV."""

    message_pattern: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    """Match a regular expression (RE2 syntax) anywhere in the failure message, such as `CUDA error|ECC`."""

    action: Literal["Restart", "RestartAndIgnoreMaxRestarts", "Fail", "ExcludeNode"]
    """What to do. Restart counts towards maxRestarts, RestartAndIgnoreMaxRestarts does not. Fail fails the job.
    ExcludeNode restarts like Restart and excludes the failed node.
    """


class Restart(APIModel):
    """Restart policy: when a failed job is restarted, how often, and where."""

    max_restarts: Annotated[int, Field(strict=True, ge=0, le=10000)] = 10
    """Maximum number of restarts without progress before the job fails. A new verified snapshot resets the count. With
    0, only disruptions and failures that match a RestartAndIgnoreMaxRestarts rule are restarted.
    """

    window_seconds: PositiveSeconds | None = None
    """Count only restarts within a sliding window of this many seconds. Default: count all since the last progress."""

    backoff: Backoff = Backoff()
    """Delay between restarts."""

    scope: Literal["Gang", "InPlace", "Live"] = "Gang"
    """Gang replaces all pods. InPlace replaces only failed pods; the other pods restart their ranks, without scheduling
    or image pulls. Live (alpha; data parallel on CPUs, in the built-in loop or a script with `attach_live`) replaces
    failed pods while the other ranks train on, and restarts in place where they cannot. A change takes effect at
    the next attempt, which gets new pods; from Gang to InPlace with elastic, pods that run are kept.
    """

    rules: Annotated[tuple[RestartRule, ...], Field(max_length=32)] = ()
    """Rules that are evaluated in order before the defaults. Defaults: exit codes 64 and 77, the same error of the
    program at the same step twice in a row, and OutOfMemory three times in a row without progress fail the job;
    disruptions restart it without counting; every other failure counts.
    """

    node_lost_seconds: Seconds = 30
    """Seconds that a node may be NotReady before the job is restarted without it. While the gang makes no progress
    there is no grace: the node is lost as soon as it is NotReady. A node whose kubelet never acknowledges a pod is lost
    10 s plus this time after the binding. Where a deletion is unconfirmed 10 s after the pod's grace period, this grace
    is skipped too.
    """

    force_delete_lost_pods: Annotated[bool, Field(strict=True)] = False
    """Force-delete the pods of a lost node without waiting for its kubelet. They may still be running; the fencing
    token prevents them from writing snapshots.
    """

    exclude_node_after: Annotated[int, Field(strict=True, ge=0, le=100)] = 3
    """Number of failures that the node may have caused after which the job no longer uses it; as long as the job has
    run on no other node, others are only preferred. 0 disables this.
    """


class Stall(APIModel):
    """Stall detection: a rank without progress is killed and the job is restarted. The limit is ten times the rank's
    step time, within the bounds below.
    """

    min_seconds: PositiveSeconds = 30
    """Minimum number of seconds without progress before a rank counts as stalled, however fast its steps are. Ten times
    as many for a script whose steps are only observed.
    """

    max_seconds: PositiveSeconds = 1800
    """Maximum number of seconds without progress, however slow the steps are. Also the limit for the first step."""


class Scheduling(APIModel):
    """Gang scheduling: all pods of the job are scheduled together, or none."""

    gang: Literal["None", "Coscheduling", "Volcano", "Kueue"] = "None"
    """Component that admits the gang. For Coscheduling and Volcano the operator creates a PodGroup, for Kueue it sets
    the pod-group labels.
    """

    scheduler_name: ObjectName | None = None
    """Scheduler of the pods. Default: scheduler-plugins-scheduler for Coscheduling, volcano for Volcano, otherwise the
    cluster's default scheduler.
    """

    queue: ObjectName | None = None
    """Name of the queue: a LocalQueue for Kueue, a Queue for Volcano."""

    priority_class_name: ObjectName | None = None
    """PriorityClass of the pods."""

    timeout_seconds: PositiveSeconds | None = None
    """Seconds after which an incomplete gang releases its nodes. It is created again after a backoff."""
