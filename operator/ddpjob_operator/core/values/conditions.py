"""Conditions of a job, kept by the rules of the Kubernetes API conventions."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from ddpjob_operator.api.status import Condition

SUSPENDED = "Suspended"
INITIALIZED = "Initialized"
SCHEDULED = "Scheduled"
RUNNING = "Running"
RESTARTING = "Restarting"
DEGRADED = "Degraded"
SNAPSHOTS_FAILING = "SnapshotsFailing"
SHUTDOWN_TOO_SHORT = "ShutdownTooShort"
LOSS_NOT_FINITE = "LossNotFinite"
COMPLETE = "Complete"
FAILED = "Failed"

ATTENTION = (DEGRADED, SNAPSHOTS_FAILING, LOSS_NOT_FINITE, SHUTDOWN_TOO_SHORT)
"""Those that need attention while they are True. The phase says what the others say."""

REASON_LIMIT = 1024
MESSAGE_LIMIT = 32768


@dataclass(frozen=True, slots=True)
class Update:
    """The new state of a condition."""

    type: str
    holds: bool
    reason: str
    message: str = ""
    write_false: bool = False
    """Write the condition although it does not hold and never has."""


def set_condition(
    conditions: tuple[Condition, ...], update: Update, now: datetime, generation: int
) -> tuple[Condition, ...]:
    """`conditions` with one of them set; `lastTransitionTime` moves only when the status does.

    One that never held is left out rather than set to False, which costs no write; unless `update.write_false`.
    """
    status = "True" if update.holds else "False"
    before = find(conditions, update.type)
    if before is None and not (update.holds or update.write_false):
        return conditions
    since = before.last_transition_time if before and before.status == status else now
    after = Condition(
        type=update.type,
        status=status,
        reason=update.reason[:REASON_LIMIT],
        message=update.message[:MESSAGE_LIMIT],
        last_transition_time=since,
        observed_generation=generation,
    )
    if before is None:
        return (*conditions, after)
    return tuple(after if condition.type == update.type else condition for condition in conditions)


def find(conditions: tuple[Condition, ...], type_: str) -> Condition | None:
    """The condition of one type."""
    return next((condition for condition in conditions if condition.type == type_), None)


def holds(conditions: tuple[Condition, ...], type_: str) -> bool:
    """Whether a condition is there and True."""
    condition = find(conditions, type_)
    return condition is not None and condition.status == "True"
