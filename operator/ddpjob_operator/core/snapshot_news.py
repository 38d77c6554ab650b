"""What the trainer says of its snapshots beyond the newest one: that they fail, and which did not verify."""

from __future__ import annotations

from datetime import datetime

from ddpjob_operator.api.status import DDPJobStatus
from ddpjob_operator.core import conditions as cond
from ddpjob_operator.core.actions import Event
from ddpjob_operator.core.model import Job
from ddpjob_operator.core.report import TrainerReport

FAILURES_IN_A_ROW = 3
MOST_REMEMBERED = 10
_LONGEST = 512


def with_snapshot_news(job: Job, status: DDPJobStatus, report: TrainerReport | None, now: datetime) -> DDPJobStatus:
    """`status` with the condition SnapshotsFailing and the list of snapshots that were set aside."""
    if report is None or not report.is_of(job.uid, status.attempt):
        return status
    problem, held = report.snapshot_problem, cond.holds(status.conditions, cond.SNAPSHOTS_FAILING)
    failures = problem.failures if problem is not None else None
    # more of the same is not worth a write each, and a save that was only skipped proves nothing
    if problem is not None and failures is not None and failures >= FAILURES_IN_A_ROW and not held:
        message = f"{failures} snapshots in a row could not be saved. {problem.message[:_LONGEST]}"
        status = _said(job, status, True, "SavesFail", message, now)
    elif held and problem is None:
        status = _said(job, status, False, "Saved", "", now)
    return _with_set_aside(status, report.snapshots_set_aside)


def snapshot_events(before: DDPJobStatus, after: DDPJobStatus) -> tuple[Event, ...]:
    """What a person should hear of: saves that began to fail, and snapshots that turned out to be corrupt."""
    events = [
        Event("Warning", "SnapshotCorrupt", message)
        for message in after.corrupt_snapshots
        if message not in before.corrupt_snapshots
    ]
    failing = cond.find(after.conditions, cond.SNAPSHOTS_FAILING)
    if failing and failing.status == "True" and not cond.holds(before.conditions, cond.SNAPSHOTS_FAILING):
        events.append(Event("Warning", cond.SNAPSHOTS_FAILING, failing.message))
    return tuple(events)


def _said(job: Job, status: DDPJobStatus, failing: bool, reason: str, message: str, now: datetime) -> DDPJobStatus:
    conditions = cond.set_condition(
        status.conditions, cond.SNAPSHOTS_FAILING, failing, reason, message, now=now, generation=job.generation
    )
    return status.model_copy(update={"conditions": conditions})


def _with_set_aside(status: DDPJobStatus, found: tuple[str, ...]) -> DDPJobStatus:
    messages = dict.fromkeys(message[:_LONGEST] for message in found)
    news = [message for message in messages if message not in status.corrupt_snapshots]
    if not news:
        return status
    return status.model_copy(update={"corrupt_snapshots": (*status.corrupt_snapshots, *news)[-MOST_REMEMBERED:]})
