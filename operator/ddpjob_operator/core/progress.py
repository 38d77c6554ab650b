"""From what the trainer reports to what the status says: progress, the newest snapshot, and the post-mortem of
a failure.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from ddpjob_operator.api.status import DDPJobStatus, FailureStatus, Progress, SnapshotStatus
from ddpjob_operator.core.advice import diagnose
from ddpjob_operator.core.failures import Failure, finite, integer

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
    if snapshot is not None and _is_news(snapshot, status.snapshot):
        update["snapshot"] = snapshot
    return status.model_copy(update=update) if update else status


def failure_status(status: DDPJobStatus, failure: Failure, now: datetime, log_tail: str = "") -> FailureStatus:
    """The post-mortem that is kept after the pods are gone."""
    reached, diagnosis = status.progress.step if status.progress else None, diagnose(failure)
    return FailureStatus(
        attempt=status.attempt,
        time=now,
        node_rank=failure.node_rank,
        rank=failure.rank,
        pod_name=failure.pod_name,
        node_name=failure.node_name,
        exit_code=failure.exit_code,
        signal=failure.signal,
        reason=diagnosis.reason,
        message=failure.message[:MESSAGE_LIMIT],
        step=failure.step if failure.step is not None else reached,
        snapshot_step=status.snapshot.step if status.snapshot else None,
        advice=diagnosis.advice,
        log_tail=log_tail,
    )


def _is_news(found: SnapshotStatus, known: SnapshotStatus | None) -> bool:
    """Newer, or the same and now verified: another node may not know that yet."""
    if known is None or found.step != known.step:
        return known is None or found.step > known.step
    return found.verified or not known.verified


def _progress(report: Mapping[str, Any], now: datetime) -> Progress | None:
    step = integer(report.get("step"))
    if step is None:
        return None
    told = report.get("metrics")
    metrics = {
        str(name): number
        for name, value in (told.items() if isinstance(told, Mapping) else ())
        if (number := finite(value)) is not None and str(name).isprintable()
    }
    return Progress(
        epoch=integer(report.get("epoch")),
        step=step,
        total_steps=integer(report.get("totalSteps")),
        loss=_rounded(report.get("loss")),
        samples_per_second=finite(report.get("samplesPerSecond")),
        eta=_eta(report, now),
        metrics=metrics or None,
    )


def _rounded(value: Any) -> float | None:
    """In six digits: kubectl prints every digit that is there."""
    number = finite(value)
    return None if number is None else float(f"{number:.6g}")


def _eta(report: Mapping[str, Any], now: datetime) -> datetime | None:
    """From the report's own time: the same report, looked at again later, says the same."""
    seconds_left, told = finite(report.get("etaSeconds")), finite(report.get("time"))
    if seconds_left is None:
        return None
    return _moment((told if told is not None else now.timestamp()) + seconds_left)


def _snapshot(found: Any) -> SnapshotStatus | None:
    if not isinstance(found, Mapping):
        return None
    step, told = integer(found.get("step")), finite(found.get("time"))
    time = _moment(told) if told is not None else None
    if step is None or time is None:
        return None
    return SnapshotStatus(step=step, time=time, verified=found.get("verified") is True)


def _moment(seconds: float) -> datetime | None:
    """Seconds since the epoch as a time, in whole seconds; None if no calendar has it."""
    try:
        return datetime.fromtimestamp(seconds, UTC).replace(microsecond=0)
    except (ValueError, OverflowError, OSError):
        return None
