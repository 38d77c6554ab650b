"""How long jobs wait, as what a write of the status shows to be over.

Nothing is kept between two writes, so a wait that ends while no operator runs is recognized by the next one.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from ddpjob_operator.api.status import DDPJobStatus, Goodput, Phase
from ddpjob_operator.core.ledger.goodput import seconds_of
from ddpjob_operator.core.ledger.usage import HELD

_BEFORE_RUNNING = ("pulling", "recovering")
"""Activities with nodes that a gang may go through before it has run for the first time."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Waits in seconds that ended with a write; None for one that did not end with it."""

    queue: float | None = None
    """Waiting for nodes, until all pods of the gang ran for the first time."""
    first_step: float | None = None
    """From the start of the job, suspensions left out, to its first training step."""
    recovery: float | None = None
    """From a failure to the next training step, where no resize and no suspension came in between."""


def waits_between(before: DDPJobStatus, after: DDPJobStatus) -> Waits:
    """What ended between what is on record and `after`."""
    if after.goodput is None:
        return Waits()
    queue = seconds_of(after.goodput)["queued"] if _runs_first(before, after) else None
    trained = after.internal.reported_seconds.get("training", 0.0)
    if trained <= 0 or before.internal.reported_seconds.get("training", 0.0) > 0:
        return Waits(queue)
    failed, until = _failed_at(after), after.goodput.last_update_time
    if failed is not None and until is not None:
        return Waits(queue, recovery=max(0.0, (until - failed).total_seconds() - trained))
    if after.attempt and before.progress is not None and before.progress.step:
        return Waits(queue)
    spent = seconds_of(after.goodput)
    return Waits(queue, first_step=sum(spent.values()) - spent["suspended"] - spent["training"])


def _failed_at(status: DDPJobStatus) -> datetime | None:
    """When the failure was found that led to this attempt. A suspension may have come between them, and with live
    recovery a failure may have led to none.
    """
    failure, begun = status.last_failure, status.attempt_start_time
    if failure is None or begun is None or failure.attempt >= status.attempt or failure.time < begun:
        return None
    return failure.time


def _runs_first(before: DDPJobStatus, after: DDPJobStatus) -> bool:
    if after.phase is not Phase.RUNNING or before.phase is Phase.RUNNING:
        return False
    ledger = seconds_of(before.goodput or Goodput())
    return not any(ledger[name] for name in HELD if name not in _BEFORE_RUNNING)
