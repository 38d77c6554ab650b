"""From what the trainer reports to what the status says: progress, the newest snapshot, and the post-mortem of
a failure.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from ddpjob_operator.api.status import DDPJobStatus, FailureStatus, Progress, SnapshotStatus
from ddpjob_operator.core.advice import diagnose
from ddpjob_operator.core.failures import Failure
from ddpjob_operator.core.report import TrainerReport, moment

MESSAGE_LIMIT = 4096

_ESTIMATES = {"eta", "remaining_seconds"}
"""Fields that are wrong, not only old, when a newer report lacks them."""

_LONGEST_ESTIMATE = 1e9


def with_report(status: DDPJobStatus, report: TrainerReport | None, uid: str, now: datetime) -> DDPJobStatus:
    """`status` with the progress of a `/status` answer, if it is the current attempt's of this very job."""
    if report is None or not report.is_of(uid, status.attempt):
        return status
    return with_final_report(status, report, now)


def with_final_report(status: DDPJobStatus, report: TrainerReport | None, now: datetime) -> DDPJobStatus:
    """`status` with the progress that a report or a termination message carries.

    Fields that the report lacks keep their value, except for the estimates.
    """
    if report is None:
        return status
    update: dict[str, Any] = {}
    reported = _progress(report, now)
    kept = status.progress.model_dump(exclude_none=True, exclude=_ESTIMATES) if status.progress else {}
    if merged := kept | (reported.model_dump(exclude_none=True) if reported else {}):
        update["progress"] = Progress.model_validate(merged)
    if report.snapshot is not None and _is_news(report.snapshot, status.snapshot):
        update["snapshot"] = report.snapshot
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


def _progress(report: TrainerReport, now: datetime) -> Progress | None:
    if report.step is None:
        return None
    return Progress(
        epoch=report.epoch,
        step=report.step,
        total_steps=report.total_steps,
        loss=None if report.loss is None else float(f"{report.loss:.6g}"),  # kubectl prints every digit that is there
        samples_per_second=report.samples_per_second,
        eta=_eta(report, now),
        remaining_seconds=_remaining(report.eta_seconds),
        metrics=dict(report.metrics) or None,
    )


def _remaining(seconds: float | None) -> int | None:
    return round(seconds) if seconds is not None and 0 <= seconds < _LONGEST_ESTIMATE else None


def _eta(report: TrainerReport, now: datetime) -> datetime | None:
    """From the report's own time: the same report, looked at again later, says the same."""
    if report.eta_seconds is None:
        return None
    return moment((report.time if report.time is not None else now.timestamp()) + report.eta_seconds)
