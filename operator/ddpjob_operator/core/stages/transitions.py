"""What a status says when a job comes to another phase: the phase, its conditions, and the times that belong to it."""

from __future__ import annotations

from datetime import datetime

from ddpjob_operator.api.status import Condition, DDPJobStatus, Phase
from ddpjob_operator.core.failure.detect import last_report
from ddpjob_operator.core.gang.in_place import ended_before
from ddpjob_operator.core.gang.members import counted, stop
from ddpjob_operator.core.ledger.progress import with_final_report
from ddpjob_operator.core.stages.finished import clean_up
from ddpjob_operator.core.values import conditions as cond
from ddpjob_operator.core.values.actions import Event, Plan
from ddpjob_operator.core.values.job import Job
from ddpjob_operator.core.values.observed import Observed, PodView


def plan_succeeded(
    job: Job, observed: Observed, status: DDPJobStatus, pods: tuple[PodView, ...], now: datetime
) -> Plan:
    status = with_final_report(counted(job, status, pods), last_report(pods), now)
    who = "node rank 0" if job.spec.success_policy == "FirstNode" else f"all {len(pods)} nodes"
    message = f"{who} finished; restarts: {status.restarts}"
    after = status.model_copy(
        update={
            "phase": Phase.SUCCEEDED,
            "completion_time": now,
            "restart_at": None,
            "retry_at": None,
            "conditions": phase_conditions(job, status, now, complete=("Completed", message)),
        }
    )
    old = tuple(pod for pod in observed.pods if pod.attempt != status.attempt)
    current = tuple(pod for pod in observed.pods if pod.attempt == status.attempt)
    left = clean_up(job, after, current)
    return Plan(
        after,
        (*stop(old, everything=True), *left),
        status_first=bool(left),  # those pods are the proof of it
        events=(Event("Normal", "Succeeded", message),),
    )


def plan_failed(job: Job, observed: Observed, status: DDPJobStatus, reason: str, message: str, now: datetime) -> Plan:
    after = status.model_copy(
        update={
            "phase": Phase.FAILED,
            "completion_time": now,
            "restart_at": None,
            "retry_at": None,
            "conditions": phase_conditions(job, status, now, failed=(reason, message)),
        }
    )
    line = message.splitlines()[0] if message else reason
    left = clean_up(job, after, observed.pods)
    return Plan(after, left, status_first=True, events=(Event("Warning", "Failed", line),))


def incomplete_again(job: Job, status: DDPJobStatus, pods: tuple[PodView, ...], now: datetime) -> DDPJobStatus:
    """A gang that was thought to be complete: a pod that was kept for it had ended before it heard of it."""
    names = ", ".join(pod.name for pod in pods if ended_before(pod, status))
    message = f"{names} ended before attempt {status.attempt} began; it is replaced"
    conditions = phase_conditions(job, status, now, restarting=("KeptPodEnded", message))
    return status.model_copy(update={"phase": Phase.RESTARTING, "conditions": conditions})


def degraded(job: Job, status: DDPJobStatus, reason: str, message: str, now: datetime) -> DDPJobStatus:
    after = cond.set_condition(
        status.conditions, cond.DEGRADED, True, reason, message, now=now, generation=job.generation
    )
    return status.model_copy(update={"conditions": after})


def phase_conditions(
    job: Job,
    status: DDPJobStatus,
    now: datetime,
    *,
    running: tuple[str, str] | None = None,
    restarting: tuple[str, str] | None = None,
    suspended: tuple[str, str] | None = None,
    complete: tuple[str, str] | None = None,
    failed: tuple[str, str] | None = None,
) -> tuple[Condition, ...]:
    """Exactly one of the five holds; the others, where they were ever said, become False for the same reason."""
    said = running or restarting or suspended or complete or failed or ("", "")
    after = status.conditions
    for type_, what in (
        (cond.RUNNING, running),
        (cond.RESTARTING, restarting),
        (cond.SUSPENDED, suspended),
        (cond.COMPLETE, complete),
        (cond.FAILED, failed),
    ):
        reason, message = what or (said[0], "")
        after = cond.set_condition(after, type_, what is not None, reason, message, now=now, generation=job.generation)
    if running or restarting or suspended:
        words = ("AllScheduled", "every pod has a node") if running else (said[0], "")
        after = cond.set_condition(
            after, cond.SCHEDULED, running is not None, *words, now=now, generation=job.generation
        )
    if not running:  # what kept this attempt from running is over; a running one is looked at by `_with_trouble`
        after = cond.set_condition(after, cond.DEGRADED, False, "AsExpected", "", now=now, generation=job.generation)
    return after
