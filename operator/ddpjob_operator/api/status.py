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
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"

    @property
    def final(self) -> bool:
        return self in (Phase.SUCCEEDED, Phase.FAILED)


class Condition(APIModel):
    """One aspect of the job's state (metav1.Condition)."""

    type: Annotated[str, Field(max_length=316)]
    """Running, Restarting, Degraded, Complete or Failed."""

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


class DDPJobStatus(APIModel):
    """What the operator knows of the job."""

    phase: Phase | None = None
    """Pending, Starting, Running, Restarting, Succeeded or Failed."""

    conditions: tuple[Condition, ...] = ()
    """Running, Restarting, Degraded, Complete, Failed."""

    attempt: int = 0
    """This life of the gang, from 0. A pod's name carries it, and so does its claim on the volume."""

    restarts: int = 0
    """Restarts counted against restart.maxRestarts."""

    restarts_since_progress: int = 0
    """Restarts in a row that brought no newer snapshot; the backoff grows with them."""

    restart_at: datetime | None = None
    """While Restarting: when the next attempt starts."""

    nodes: NodeCount = NodeCount()
    """Pods of the current attempt."""

    progress: Progress | None = None
    """How far training has come."""

    snapshot: SnapshotStatus | None = None
    """The newest snapshot."""

    last_failure: FailureStatus | None = None
    """What ended the last attempt that failed. Kept after the pods are gone."""

    spec_digests: dict[str, str] | None = None
    """A digest of each spec field that must not change while the job runs, as the current attempt was started with."""

    observed_generation: int | None = None
    """The generation of the spec that this status is about."""

    start_time: datetime | None = None
    """When the operator first acted on the job."""

    completion_time: datetime | None = None
    """When the job became Succeeded or Failed."""
