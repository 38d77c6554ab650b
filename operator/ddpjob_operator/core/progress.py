"""From what the trainer reports to what the status says: progress, the newest snapshot, and the post-mortem of
a failure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from ddpjob_operator.api.status import DDPJobStatus, FailureStatus, Progress, SnapshotStatus
from ddpjob_operator.core.failures import Failure, advice_for

MESSAGE_LIMIT = 4096


def with_report(status: DDPJobStatus, report: Mapping[str, Any] | None, uid: str, now: datetime) -> DDPJobStatus:
    """`status` with the progress of a `/status` answer, if it is the current attempt's of this very job."""
    if report is None or report.get("uid") != uid or report.get("attempt") != status.attempt:
        return status
    return with_final_report(status, report, now)


def with_final_report(status: DDPJobStatus, report: Mapping[str, Any] | None, now: datetime) -> DDPJobStatus:
    """`status` with the progress that a report or a termination message carries.

    What it does not know stays as it was.
    """
    if report is None:
        return status
    update: dict[str, Any] = {}
    progress = _progress(report, now)
    if progress is not None:
        kept = status.progress.model_dump(exclude_none=True) if status.progress else {}
        update["progress"] = Progress.model_validate(kept | progress.model_dump(exclude_none=True))
    snapshot = _snapshot(report.get("snapshot"))
    if snapshot is not None and (status.snapshot is None or snapshot.step >= status.snapshot.step):
        update["snapshot"] = snapshot
    return status.model_copy(update=update) if update else status


def failure_status(status: DDPJobStatus, failure: Failure, now: datetime) -> FailureStatus:
    """The post-mortem that is kept after the pods are gone."""
    pod = failure.pod
    reached = status.progress.step if status.progress else None
    return FailureStatus(
        attempt=status.attempt,
        time=now,
        node_rank=failure.node_rank,
        rank=failure.rank,
        pod_name=pod.name if pod else _named(failure),
        node_name=pod.node_name if pod else None,
        exit_code=failure.exit_code,
        reason=failure.reason,
        message=failure.message[:MESSAGE_LIMIT],
        step=failure.step if failure.step is not None else reached,
        advice=advice_for(failure.reason),
    )


def _named(failure: Failure) -> str | None:
    """The name of a pod of which only the message is left."""
    words = failure.message.split()
    return words[1] if failure.reason == "PodDeleted" and len(words) > 1 else None


def _progress(report: Mapping[str, Any], now: datetime) -> Progress | None:
    if report.get("step") is None:
        return None
    seconds_left = _finite(report.get("etaSeconds"))
    metrics = {
        str(name): number
        for name, value in (report.get("metrics") or {}).items()
        if (number := _finite(value)) is not None
    }
    return Progress(
        epoch=report.get("epoch"),
        step=report.get("step"),
        total_steps=report.get("totalSteps"),
        loss=_finite(report.get("loss")),
        samples_per_second=_finite(report.get("samplesPerSecond")),
        eta=now + timedelta(seconds=seconds_left) if seconds_left is not None else None,
        metrics=metrics or None,
    )


def _snapshot(found: Any) -> SnapshotStatus | None:
    if not isinstance(found, Mapping) or found.get("step") is None or found.get("time") is None:
        return None
    return SnapshotStatus(
        step=int(found["step"]),
        time=datetime.fromtimestamp(float(found["time"]), UTC).replace(microsecond=0),
        verified=bool(found.get("verified")),
    )


def _finite(value: Any) -> float | None:
    """A number that JSON and an API server can carry: a loss of NaN is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
