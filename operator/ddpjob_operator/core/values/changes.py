"""Typed changes of the models of `api`, which are frozen: mypy knows the name and the type of every field.

`recorded` cannot name the fields that `core.transitions` owns; `transitioned` is for that module alone.
"""

from __future__ import annotations

from datetime import datetime
from typing import TypedDict, Unpack

from ddpjob_operator.api.spec import DDPJobSpec
from ddpjob_operator.api.status import (
    Condition,
    DDPJobStatus,
    FailureStatus,
    Goodput,
    Internal,
    NodeCount,
    Notification,
    Phase,
    Progress,
    SnapshotStatus,
    Summary,
    UnresolvedSteps,
)


class Recorded(TypedDict, total=False):
    """Fields of a status that any room of core may change."""

    summary: Summary | None
    restarts: int
    live_recoveries: int | None
    restarts_since_progress: int
    restart_times: tuple[datetime, ...]
    disruptions: int
    disruptions_since_progress: int
    initializer_failures: int
    nodes: NodeCount
    progress: Progress | None
    snapshot: SnapshotStatus | None
    last_failure: FailureStatus | None
    failures: tuple[FailureStatus, ...]
    node_failures: dict[str, int]
    node_failure_times: dict[str, datetime]
    excluded_nodes: tuple[str, ...]
    corrupt_snapshots: tuple[str, ...]
    observed_generation: int | None


class Owned(Recorded, total=False):
    """All fields of a status."""

    goodput: Goodput | None
    phase: Phase | None
    conditions: tuple[Condition, ...]
    attempt: int
    attempt_start_time: datetime | None
    code_digest: str | None
    restart_at: datetime | None
    retry_at: datetime | None
    internal: Internal
    selector: str | None
    start_time: datetime | None
    suspended_seconds: float
    completion_time: datetime | None


def recorded(status: DDPJobStatus, **fields: Unpack[Recorded]) -> DDPJobStatus:
    """`status` with other values of some fields."""
    return status.model_copy(update=dict(fields))


def transitioned(status: DDPJobStatus, **fields: Unpack[Owned]) -> DDPJobStatus:
    """`status` with other values of some fields. For `core.transitions` alone."""
    return status.model_copy(update=dict(fields))


def with_generation(status: DDPJobStatus, generation: int) -> DDPJobStatus:
    """`status` and its conditions as of another generation of the spec. For `core.transitions` alone."""
    update = {"observed_generation": generation}
    conditions = tuple(condition.model_copy(update=update) for condition in status.conditions)
    return transitioned(status, conditions=conditions, observed_generation=generation)


def with_ledger(
    status: DDPJobStatus, goodput: Goodput, reported_seconds: dict[str, float], unresolved: UnresolvedSteps | None
) -> DDPJobStatus:
    """`status` with another ledger of its time, what of it the trainer of this attempt has reported, and the steps of
    the attempt before that may be lost.
    """
    changed = {"reported_seconds": reported_seconds, "unresolved_steps": unresolved}
    internal = status.internal.model_copy(update=changed)
    return status.model_copy(update={"goodput": goodput, "internal": internal})


def with_held(status: DDPJobStatus, node_seconds: dict[str, float], gpu_seconds: dict[str, float]) -> DDPJobStatus:
    """`status` with other seconds for which its gangs have held nodes and GPUs, by activity."""
    internal = status.internal.model_copy(update={"node_seconds": node_seconds, "gpu_seconds": gpu_seconds})
    return status.model_copy(update={"internal": internal})


def with_notification(status: DDPJobStatus, notification: Notification) -> DDPJobStatus:
    """`status` with another record of the notification of the job's end."""
    internal = status.internal.model_copy(update={"notification": notification})
    return status.model_copy(update={"internal": internal})


def with_tries(status: DDPJobStatus, *, failures: int, disruptions: int) -> DDPJobStatus:
    """`status` with other numbers of initializer pods that failed, and of those that the cluster ended."""
    internal = status.internal.model_copy(update={"initializer_disruptions": disruptions or None})
    return status.model_copy(update={"initializer_failures": failures, "internal": internal})


def with_refund(status: DDPJobStatus) -> DDPJobStatus:
    """`status` with one restart fewer, and with one more on record as refunded."""
    internal = status.internal.model_copy(update={"refunded_restarts": (status.internal.refunded_restarts or 0) + 1})
    return status.model_copy(update={"restarts": status.restarts - 1, "internal": internal})


def with_rule_excluded_nodes(status: DDPJobStatus, nodes: tuple[str, ...]) -> DDPJobStatus:
    """`status` with other nodes on record as excluded by a rule."""
    internal = status.internal.model_copy(update={"rule_excluded_nodes": nodes})
    return status.model_copy(update={"internal": internal})


def with_node_names_refused(status: DDPJobStatus) -> DDPJobStatus:
    """`status` with it on record that pods find no node while they exclude nodes by name."""
    internal = status.internal.model_copy(update={"node_names_refused": True})
    return status.model_copy(update={"internal": internal})


def with_gang_record(
    status: DDPJobStatus,
    *,
    succeeded_nodes: tuple[int, ...] | None = None,
    avoided_nodes: tuple[str, ...] | None = None,
) -> DDPJobStatus:
    """`status` with other facts on record about the pods of this attempt. For `core.transitions` alone."""
    facts = {"succeeded_nodes": succeeded_nodes, "avoided_nodes": avoided_nodes}
    changed = {name: fact for name, fact in facts.items() if fact is not None}
    return status.model_copy(update={"internal": status.internal.model_copy(update=changed)})


def with_replacements(status: DDPJobStatus, lost_pods: dict[str, int], kept_pods: dict[str, int]) -> DDPJobStatus:
    """`status` with other pods of this attempt on record as lost, and as kept. For `core.transitions` alone."""
    update = {"lost_pods": lost_pods, "kept_pods": kept_pods}
    return status.model_copy(update={"internal": status.internal.model_copy(update=update)})


def resized(spec: DDPJobSpec, *, nodes: int, spares: int) -> DDPJobSpec:
    """`spec` with other numbers of pods."""
    return spec.model_copy(update={"nodes": nodes, "spares": spares})


def shortened(failure: FailureStatus, longest: int) -> FailureStatus:
    """`failure` without its log, and with at most so many characters of its message."""
    return failure.model_copy(update={"message": failure.message[:longest], "log_tail": ""})
