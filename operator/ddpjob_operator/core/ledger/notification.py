"""The notification of a job's end: when it is due, and the CloudEvent that it consists of.

The write of the status that makes the phase final also records that a notification is pending, so an operator that
ends in between still knows of it. The outcome is recorded after the request. A receiver may therefore get an event
twice, if the operator ends between the two, and tells that by the event's id.
"""

from __future__ import annotations

from typing import Any

from ddpjob_operator.api.status import DDPJobStatus, Notification, Phase
from ddpjob_operator.core.failure.log_tail import mask, without_secrets
from ddpjob_operator.core.values import conditions as cond
from ddpjob_operator.core.values.changes import with_notification
from ddpjob_operator.core.values.job import Job

CONTENT_TYPE = "application/cloudevents+json; charset=UTF-8"
"""Structured mode of the HTTP binding of CloudEvents 1.0."""

LONGEST_MESSAGE = 4096
"""Characters. Receivers need not accept events larger than 64 KiB (CloudEvents 1.0, size limits)."""


def recorded_notification(
    before: DDPJobStatus, after: DDPJobStatus, outcome: Notification | None = None
) -> DDPJobStatus:
    """`after` with what is to be on record of the notification, whose request has had this outcome."""
    if after.is_final and not before.is_final:
        return with_notification(after, Notification.PENDING)
    if is_pending(after) and outcome is not None:
        return with_notification(after, outcome)
    return after


def is_pending(status: DDPJobStatus) -> bool:
    """Whether the end is on record, and no outcome of its notification."""
    return status.is_final and status.internal.notification is Notification.PENDING


def end_event(metadata: dict[str, Any], job: Job | None, status: DDPJobStatus) -> dict[str, Any]:
    """The CloudEvent of a job that has ended with this status. Without `job`, its spec could not be read."""
    name, namespace, uid = metadata["name"], metadata["namespace"], metadata["uid"]
    succeeded = status.phase is Phase.SUCCEEDED
    ended = cond.find(status.conditions, cond.COMPLETE if succeeded else cond.FAILED)
    failure, progress, goodput = status.last_failure, status.progress, status.goodput
    data = {
        "name": name,
        "namespace": namespace,
        "uid": uid,
        "owner": (job.owner if job else "") or None,
        "phase": status.phase,
        "reason": ended.reason if ended else None,
        "message": _message(job, ended.message) if ended else None,
        "advice": (failure.advice if failure and not succeeded else "") or None,
        "attempt": status.attempt,
        "restarts": status.restarts,
        "step": progress.step if progress else None,
        "totalSteps": progress.total_steps if progress else None,
        "seconds": _seconds(status),
        "goodput": goodput.ratio if goodput else None,
        "codeDigest": job.code_digest if job else None,
    }
    event = {
        "specversion": "1.0",
        "id": f"{uid}-{status.phase}",
        "source": f"/apis/training.ddpjob.io/v1alpha1/namespaces/{namespace}/ddpjobs/{name}",
        "type": f"io.ddpjob.training.job.{str(status.phase).lower()}",
        "subject": f"{namespace}/{name}",
        "time": status.completion_time.isoformat().replace("+00:00", "Z") if status.completion_time else None,
        "datacontenttype": "application/json",
        "data": {key: value for key, value in data.items() if value is not None},
    }
    return {key: value for key, value in event.items() if value is not None}


def _message(job: Job | None, text: str) -> str:
    message = without_secrets(job, text) if job else mask(text)
    return message if len(message) <= LONGEST_MESSAGE else message[: LONGEST_MESSAGE - 1] + "…"


def _seconds(status: DDPJobStatus) -> float | None:
    if status.start_time is None or status.completion_time is None:
        return None
    return (status.completion_time - status.start_time).total_seconds()
