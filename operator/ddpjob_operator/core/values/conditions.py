"""Conditions of a job, kept by the rules of the Kubernetes API conventions."""

from __future__ import annotations

from datetime import datetime

from ddpjob_operator.api.status import Condition

SUSPENDED = "Suspended"
INITIALIZED = "Initialized"
SCHEDULED = "Scheduled"
RUNNING = "Running"
RESTARTING = "Restarting"
DEGRADED = "Degraded"
SNAPSHOTS_FAILING = "SnapshotsFailing"
COMPLETE = "Complete"
FAILED = "Failed"

REASON_LIMIT = 1024
MESSAGE_LIMIT = 32768


def set_condition(
    conditions: tuple[Condition, ...],
    type_: str,
    holds: bool,
    reason: str,
    message: str,
    *,
    now: datetime,
    generation: int,
    say_false: bool = False,
) -> tuple[Condition, ...]:
    """`conditions` with one of them set; `lastTransitionTime` moves only when the status does.

    One that never held is left out rather than said to be False, which costs no write; unless `say_false`.
    """
    status = "True" if holds else "False"
    before = find(conditions, type_)
    if before is None and not (holds or say_false):
        return conditions
    since = before.last_transition_time if before and before.status == status else now
    after = Condition(
        type=type_,
        status=status,
        reason=reason[:REASON_LIMIT],
        message=message[:MESSAGE_LIMIT],
        last_transition_time=since,
        observed_generation=generation,
    )
    if before is None:
        return (*conditions, after)
    return tuple(after if condition.type == type_ else condition for condition in conditions)


def find(conditions: tuple[Condition, ...], type_: str) -> Condition | None:
    """The condition of one type."""
    return next((condition for condition in conditions if condition.type == type_), None)


def holds(conditions: tuple[Condition, ...], type_: str) -> bool:
    """Whether a condition is there and True."""
    condition = find(conditions, type_)
    return condition is not None and condition.status == "True"
