"""The parts of a spec that say what happens to the gang: when it starts, what follows a failure, how it ends."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ddpjob_operator.api.base import APIModel
from ddpjob_operator.api.pod import ObjectName

Seconds = Annotated[int, Field(strict=True, ge=0, le=31_536_000)]
PositiveSeconds = Annotated[int, Field(strict=True, ge=1, le=31_536_000)]


class Snapshots(APIModel):
    """When training state is saved to /mnt/shared/checkpoints/<job>, and how many snapshots are kept."""

    every: Annotated[str, Field(pattern=r"^([1-9][0-9]{0,8}(steps|epochs|seconds)|auto)$")] = "60seconds"
    """The interval: a number and its unit, such as `100steps`, `1epochs` or `60seconds`; or `auto`, which weighs the
    measured cost of a snapshot against how often this job fails (Young's interval).
    """

    keep: Annotated[int, Field(strict=True, ge=1, le=1000)] = 3
    """How many verified snapshots stay on the volume; older ones are removed after a newer one has been verified."""


class Elastic(APIModel):
    """Run with fewer nodes when not all can be scheduled; `spec.nodes` is the desired size.

    The global batch and the learning rate stay what they are.
    """

    min_nodes: Annotated[int, Field(strict=True, ge=1, le=1024)]
    """The fewest nodes that are worth starting with."""

    wait_seconds: Seconds = 30
    """How long to wait for the nodes that are missing before the gang starts without them."""


class Backoff(APIModel):
    """How long to wait before a restart that follows a failure without progress.

    After progress a restart is immediate.
    """

    initial_seconds: Annotated[int, Field(strict=True, ge=0, le=3600)] = 1
    """The first wait; it doubles with each restart that brought no new snapshot, and is spread by 20 % to either
    side.
    """

    max_seconds: Annotated[int, Field(strict=True, ge=0, le=86400)] = 300
    """The longest wait."""


class RestartRule(APIModel):
    """What to do about failures of one kind. All that is set has to match; the first rule that matches decides."""

    exit_codes: Annotated[tuple[Annotated[int, Field(strict=True, ge=1, le=255)], ...], Field(max_length=64)] = ()
    """Exit codes of the trainer container, any of them."""

    reasons: Annotated[
        tuple[Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9]{0,63}$", max_length=64)], ...], Field(max_length=64)
    ] = ()
    """Reasons as in status.lastFailure, any of them: OOMKilled, Evicted, Preempted, NodeLost, Stalled or others."""

    signals: Annotated[
        tuple[Annotated[str, Field(pattern=r"^SIG[A-Z0-9]{2,12}$", max_length=16)], ...], Field(max_length=32)
    ] = ()
    """Signals that ended the trainer, any of them, such as SIGKILL or SIGSEGV."""

    message_pattern: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    """A regular expression (RE2 syntax) to find in the failure's message, such as `CUDA error|ECC`."""

    action: Literal["Restart", "RestartFree", "Fail", "ExcludeNode"]
    """Restart counts against the budget, RestartFree does not, Fail ends the job, ExcludeNode counts and restarts away
    from the node that failed.
    """


class Restart(APIModel):
    """How often, and how patiently, a failed gang is started again."""

    max_restarts: Annotated[int, Field(strict=True, ge=0, le=10000)] = 10
    """Restarts without progress that the job may use up before it is Failed; a verified snapshot ahead of the last
    failure refills them. 0 means that no failure is restarted, only disruptions and what a rule calls free.
    """

    window_seconds: PositiveSeconds | None = None
    """Count only restarts within this many seconds. Default: all since progress was last made."""

    backoff: Backoff = Backoff()
    """Waiting between restarts."""

    scope: Literal["Gang", "InPlace"] = "Gang"
    """Gang replaces every pod. InPlace replaces the pods that died, and the others start their ranks again where they
    are: nothing is scheduled or pulled again.
    """

    rules: Annotated[tuple[RestartRule, ...], Field(max_length=32)] = ()
    """Looked at in order before the defaults: exit code 64 fails the job, and so does the same error at the same step
    for the second time in a row; disruptions restart it for free; everything else counts.
    """

    node_lost_seconds: Seconds = 30
    """How long a node may be NotReady before its pods are given up and the gang is started again without it."""

    force_delete_lost: Annotated[bool, Field(strict=True)] = False
    """Remove pods of a lost node from the API server without waiting for its kubelet. They may still run there; their
    writes to the volume are refused.
    """

    exclude_node_after: Annotated[int, Field(strict=True, ge=0, le=100)] = 3
    """Keep away from a node after it has failed this job so many times. 0 means never."""


class Stall(APIModel):
    """How long a rank may stand still before it is killed and the gang restarted.

    In between, the limit is ten times the rank's own step time.
    """

    min_seconds: PositiveSeconds = 30
    """Never kill sooner than this."""

    max_seconds: PositiveSeconds = 1800
    """Kill after this, whatever the step time; also the limit of the first step."""


class Scheduling(APIModel):
    """How the gang gets its nodes, all of them or none."""

    gang: Literal["None", "Coscheduling", "Volcano", "Kueue"] = "None"
    """Who admits the gang as a whole. Coscheduling and Volcano get a PodGroup, Kueue its pod-group labels."""

    scheduler_name: ObjectName | None = None
    """The scheduler that places the pods. Default: scheduler-plugins-scheduler with Coscheduling, volcano with Volcano,
    else the cluster's own.
    """

    queue: ObjectName | None = None
    """The queue to wait in: a LocalQueue with Kueue, a Queue with Volcano."""

    priority_class_name: ObjectName | None = None
    """PriorityClass of the pods."""

    timeout_seconds: PositiveSeconds | None = None
    """Give back the nodes of a gang that is not complete after so many seconds, and try again after a backoff."""
