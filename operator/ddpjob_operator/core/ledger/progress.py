"""From what the trainer reports to what the status says: progress, snapshots, and the post-mortem of a failure."""

from __future__ import annotations

import math
from datetime import datetime

from ddpjob_operator.api.status import DDPJobStatus, FailureStatus, Phase, Progress, SnapshotStatus
from ddpjob_operator.core.failure.decide import remember
from ddpjob_operator.core.failure.detect import Failure
from ddpjob_operator.core.failure.diagnosis import diagnose
from ddpjob_operator.core.transitions import (
    SUSPENDING,
    mark_loss_finite,
    mark_loss_not_finite,
    mark_shutdown_long_enough,
    mark_shutdown_too_short,
    mark_snapshots_failing,
    mark_snapshots_saved,
)
from ddpjob_operator.core.values import conditions as cond
from ddpjob_operator.core.values.actions import Event
from ddpjob_operator.core.values.changes import recorded
from ddpjob_operator.core.values.look import Look
from ddpjob_operator.core.values.trainer_report import MOST_ITEMS, TrainerReport, moment

MESSAGE_LIMIT = 4096
FAILURES_IN_A_ROW = 3
MOST_REMEMBERED = 10
_LONGEST = 512

_ESTIMATES = {"eta", "remaining_seconds"}
"""Fields that are wrong, not only old, when a newer report lacks them."""

_LONGEST_ESTIMATE = 1e9

FITS_SHARE = 0.8
"""Of the shutdown time, what a save must stay below to end ShutdownTooShort: one that is at the limit would set and end
it in turns.
"""


def with_report(look: Look) -> Look:
    """The look with what the trainer reports, if the report is about the current attempt of this very job: progress,
    the newest snapshot, whether snapshots fail, and which did not verify.
    """
    report = look.observed.report
    if report is None or not report.is_of(look.job.uid, look.status.attempt):
        return look
    status = _gone_back(look.status, report)
    if not _is_outdated(look, report):
        status = with_final_report(status, report, look.now)
    elif report.snapshot is not None:
        status = with_snapshot(status, report.snapshot)
    look = look.with_status(status)
    return with_loss_status(_with_shutdown_status(_with_snapshot_status(look, report), report), report)


def _is_outdated(look: Look, report: TrainerReport) -> bool:
    """Whether the status has been as far, by what the pod that gave the report said at its end in this attempt: at a
    suspension, or when it succeeded. A failure begins another attempt at once. Of a pod that runs it may say less: a
    rank goes back to a sound snapshot.
    """
    status = look.status
    known, lost = status.progress, status.internal.lost_pods
    if report.step is None or known is None or known.step is None or report.step > known.step:
        return False
    # with live recovery another pod tells until there is a new node rank 0
    telling = {0} if 0 not in lost.values() else set(range(look.gang_size))
    suspended = cond.find(status.conditions, cond.SUSPENDED)
    stops = status.phase is Phase.SUSPENDED or (suspended is not None and suspended.reason == SUSPENDING)
    if not stops and telling.isdisjoint(status.internal.succeeded_nodes):
        return False  # what is known may be of the attempt before
    return not any(pod.running and pod.uid not in lost and pod.node_rank in telling for pod in look.gang)


def _gone_back(status: DDPJobStatus, report: TrainerReport) -> DDPJobStatus:
    """`status` with the snapshot that its attempt has resumed from, where the one on record is newer and was saved
    before: it is no more, or could not be read.
    """
    found, known, begun = report.snapshot, status.snapshot, status.attempt_start_time
    if found is None or known is None or begun is None or report.resumed_from_step != found.step:
        return status
    return recorded(status, snapshot=found) if found.step < known.step and known.time < begun else status


def with_final_report(status: DDPJobStatus, report: TrainerReport | None, now: datetime) -> DDPJobStatus:
    """`status` with the progress that a report or a termination message carries.

    Fields that the report lacks keep their value, except for the estimates. So does each metric: a termination message
    may have room for some of them alone.
    """
    if report is None:
        return status
    progress = _progress(report, now)
    reported = progress.model_dump(exclude_none=True) if progress else {}
    kept = status.progress.model_dump(exclude_none=True, exclude=_ESTIMATES) if status.progress else {}
    if merged := kept | reported:
        if metrics := _merged(kept.get("metrics", {}), reported.get("metrics", {})):
            merged["metrics"] = metrics
        status = recorded(status, progress=Progress.model_validate(merged))
    return status if report.snapshot is None else with_snapshot(status, report.snapshot)


def _merged(kept: dict[str, float], reported: dict[str, float]) -> dict[str, float]:
    """By name, those that are reported first: no more than a report has."""
    merged = reported | {name: value for name, value in kept.items() if name not in reported}
    return dict(list(merged.items())[:MOST_ITEMS])


def with_snapshot(status: DDPJobStatus, found: SnapshotStatus) -> DDPJobStatus:
    """`status` with this snapshot, if it is newer than the one there."""
    return recorded(status, snapshot=found) if _is_newer(found, status.snapshot) else status


def with_failure(look: Look, failure: Failure, log_tail: str = "") -> Look:
    """The look with the post-mortem of a failure, as the last one and in the list of those that are remembered."""
    post_mortem = failure_status(look.status, failure, look.now, log_tail)
    failures = remember(look.status.failures, post_mortem)
    return look.with_status(recorded(look.status, last_failure=post_mortem, failures=failures))


def failure_status(status: DDPJobStatus, failure: Failure, now: datetime, log_tail: str = "") -> FailureStatus:
    """The post-mortem that is kept after the pods are gone."""
    reached = status.progress.step if status.progress else None
    saved = status.snapshot.step if status.snapshot else None
    diagnosis = diagnose(failure, saved)
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
        snapshot_step=saved,
        advice=diagnosis.advice,
        log_tail=log_tail,
    )


def _is_newer(found: SnapshotStatus, known: SnapshotStatus | None) -> bool:
    """Newer, or the same and now verified: another node may not know that yet.

    A step before the known one is newer if it was saved later: the job went back to an older snapshot.
    """
    if known is None or found.step != known.step:
        return known is None or found.step > known.step or found.time > known.time
    return found.verified or not known.verified


def _progress(report: TrainerReport, now: datetime) -> Progress | None:
    if report.step is None:
        return None
    return Progress(
        epoch=report.epoch,
        step=report.step,
        total_steps=report.total_steps,
        loss=None if report.loss is None else _six_digits(report.loss),
        samples_per_second=report.samples_per_second,
        eta=_eta(report, now),
        remaining_seconds=_remaining(report.eta_seconds),
        metrics={name: _six_digits(value) for name, value in report.metrics.items()} or None,
    )


def _six_digits(number: float) -> float:
    """kubectl prints every digit that is there."""
    return float(f"{number:.6g}")


def _remaining(seconds: float | None) -> int | None:
    return round(seconds) if seconds is not None and 0 <= seconds < _LONGEST_ESTIMATE else None


def _eta(report: TrainerReport, now: datetime) -> datetime | None:
    """From the report's own time: the same report, looked at again later, says the same."""
    if report.eta_seconds is None:
        return None
    return moment((report.time if report.time is not None else now.timestamp()) + report.eta_seconds)


def warnings(before: DDPJobStatus, after: DDPJobStatus) -> tuple[Event, ...]:
    """Events about what the trainer reports: snapshots that turned out to be corrupt, saves that began to fail, a
    shutdown time that turned out to be too short for a save, a loss that is not finite any more.
    """
    events = [
        Event("Warning", "SnapshotCorrupt", message)
        for message in after.corrupt_snapshots
        if message not in before.corrupt_snapshots
    ]
    for type_ in (cond.SNAPSHOTS_FAILING, cond.SHUTDOWN_TOO_SHORT, cond.LOSS_NOT_FINITE):
        condition = cond.find(after.conditions, type_)
        if condition and condition.status == "True" and not cond.holds(before.conditions, type_):
            events.append(Event("Warning", type_, condition.message))
    return tuple(events)


def with_loss_status(look: Look, report: TrainerReport | None) -> Look:
    """The look with the condition LossNotFinite. Only a finite loss ends it: a new attempt has none at first."""
    if report is None:
        return look
    found, known = report.non_finite_loss, cond.holds(look.status.conditions, cond.LOSS_NOT_FINITE)
    if found is not None and not known:
        return mark_loss_not_finite(look, f"the loss is NaN or infinite since step {found.step}")
    if known and found is None and report.loss is not None:
        return mark_loss_finite(look)
    return look


def _with_snapshot_status(look: Look, report: TrainerReport) -> Look:
    """The look with the condition SnapshotsFailing and the list of snapshots that were set aside.

    Only a snapshot ends the condition: a new attempt knows of no problem at first, and other nodes than that of rank 0
    never do.
    """
    problem, saved = report.snapshot_problem, look.status.snapshot
    failures = problem.failures if problem is not None else None
    known = cond.find(look.status.conditions, cond.SNAPSHOTS_FAILING)
    since = known.last_transition_time if known is not None and known.status == "True" else None
    # more of the same is not worth a write each, and a save that was only skipped proves nothing
    if problem is not None and failures is not None and failures >= FAILURES_IN_A_ROW and since is None:
        message = f"{failures} snapshots in a row could not be saved. {problem.message[:_LONGEST]}"
        look = mark_snapshots_failing(look, message)
    elif problem is None and saved is not None and since is not None and saved.time > since:
        look = mark_snapshots_saved(look)
    return look.with_status(_with_set_aside(look.status, report.snapshots_set_aside))


def _with_shutdown_status(look: Look, report: TrainerReport) -> Look:
    """The look with the condition ShutdownTooShort, from the save and the steps that the trainer has measured."""
    limit, needed = report.shutdown_seconds, report.stop_seconds
    if limit is None or needed is None:
        return look
    too_short = cond.holds(look.status.conditions, cond.SHUTDOWN_TOO_SHORT)
    if needed > limit and not too_short:
        return mark_shutdown_too_short(
            look,
            f"Two steps and a snapshot take {needed:.0f} s, but a pod that has to leave has {limit:.0f} s: it would be "
            f"killed before its snapshot is complete. Set spec.shutdownSeconds to {suggested_shutdown(needed)} or more",
        )
    if too_short and needed < FITS_SHARE * limit:
        return mark_shutdown_long_enough(look)
    return look


def suggested_shutdown(needed: float) -> int:
    """Twice what was measured, in whole tens of seconds: other pods of the gang save and write at the same time."""
    return math.ceil(2 * needed / 10) * 10


def _with_set_aside(status: DDPJobStatus, found: tuple[str, ...]) -> DDPJobStatus:
    # no more than are remembered: one that was dropped again would be new in each report
    messages = list(dict.fromkeys(message[:_LONGEST] for message in found))[-MOST_REMEMBERED:]
    if all(message in status.corrupt_snapshots for message in messages):
        return status
    others = (message for message in status.corrupt_snapshots if message not in messages)
    return recorded(status, corrupt_snapshots=(*others, *messages)[-MOST_REMEMBERED:])
