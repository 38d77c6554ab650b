"""Data before the gang: one pod that runs the job's initializers in order, once for the life of the job.

A gang of GPUs must not wait for a download, and must not download the same thing once a node. So nothing of the gang
is made before the condition Initialized holds. A try that fails is counted in the status before its pod is deleted,
and is repeated after the backoff of a restart, under another name; what it had finished it finds on the volume.

Every initializer is a container of its own, so that its credentials are nobody else's: init containers run one after
the other (Kubernetes), the last one is the pod's main container.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.core.failure.budget import backoff_seconds
from ddpjob_operator.core.failure.detect import EXIT_USER, SETTLE_SECONDS, Failure, Retry
from ddpjob_operator.core.failure.node_lost import is_lost, until_lost
from ddpjob_operator.core.gang.members import awaits_data
from ddpjob_operator.core.gang.startup_problems import (
    TROUBLE_GRACE_SECONDS,
    ask,
    find_trouble,
    is_degraded,
    until_asked,
)
from ddpjob_operator.core.ledger.progress import failure_status
from ddpjob_operator.core.manifests.initializer import build_initializer
from ddpjob_operator.core.stages.transitions import degraded, plan_failed
from ddpjob_operator.core.values import conditions as cond
from ddpjob_operator.core.values.actions import Action, CreateChild, DeletePod, Event, Plan, soonest
from ddpjob_operator.core.values.job import Defaults, Job
from ddpjob_operator.core.values.observed import InitializerView, Observed, PodPhase, PodView
from ddpjob_operator.core.values.trainer_report import read_termination

RETRIES = 3
"""Tries after the first one that failed."""


FAILED = "InitializerFailed"


_GRACE_SECONDS = 2


def plan_initializers(
    job: Job, observed: Observed, status: DDPJobStatus, now: datetime, defaults: Defaults
) -> tuple[DDPJobStatus, Plan | None]:
    """Run the initializers. With None the gang may be made, and the status says so."""
    if not awaits_data(job, status):
        return status, None
    status = status.model_copy(update={"phase": status.phase or Phase.PENDING, "start_time": status.start_time or now})
    pod = observed.initializer
    if pod is not None and pod.number > status.initializer_failures:
        status = status.model_copy(update={"initializer_failures": pod.number})  # the status was lost
    if pod is None or pod.number < status.initializer_failures:
        return status, _begin(job, observed, status, pod, now, defaults)
    if pod.succeeded:
        many = f"{len(job.spec.initializers)} initializers have" if len(job.spec.initializers) > 1 else "it has"
        return _said(job, status, True, "DataReady", f"{many} put their data on the volume", now), None
    if pod.deleting and (left := _grace_left(pod, now)) > 0:
        return status, Plan(status, requeue_after=left)  # its end comes as an event, unless its node is gone
    if pod.ended or pod.deleting or is_lost(_as_pod(pod, status), job.spec.restart, now):
        return status, _after_failure(job, observed, status, pod, now)
    return status, _waiting(job, observed, status, pod, now)


def _begin(
    job: Job, observed: Observed, status: DDPJobStatus, old: InitializerView | None, now: datetime, defaults: Defaults
) -> Plan:
    stale: tuple[Action, ...] = ()
    if old is not None and not old.deleting:
        stale = (DeletePod(old.name, old.uid, _GRACE_SECONDS),)
    wait = (status.retry_at - now).total_seconds() if status.retry_at is not None else 0.0
    if 0 < wait <= max(job.spec.restart.backoff.max_seconds, _GRACE_SECONDS):  # more: the clock was set back
        return Plan(status, stale, requeue_after=wait)
    if observed.problem is not None:
        status = degraded(job, status, observed.problem.reason, observed.problem.message, now)
    pod = build_initializer(job, status.initializer_failures, defaults)
    # that a suspension is over must be on record before there is a pod again that it would stop
    resumed = cond.find(status.conditions, cond.SUSPENDED) != cond.find(job.status.conditions, cond.SUSPENDED)
    return Plan(status, (*stale, CreateChild(pod)), status_first=resumed)


def _waiting(job: Job, observed: Observed, status: DDPJobStatus, pod: InitializerView, now: datetime) -> Plan:
    names = ", ".join(item.name for item in job.spec.initializers)
    after = _said(job, status, False, "Initializing", f"pod {pod.name} puts data on the volume: {names}", now)
    events: tuple[Event, ...] = ()
    if cond.find(status.conditions, cond.INITIALIZED) is None:
        events = (Event("Normal", "Initializing", f"fetching data before training: {names}"),)
    pods = (_as_pod(pod, status),)
    trouble = find_trouble(after, pods, observed.problem, now, observed.warnings)
    if trouble is not None and is_degraded(trouble):
        after = degraded(job, after, trouble.reason, trouble.message, now)
    else:
        conditions = cond.set_condition(
            after.conditions, cond.DEGRADED, False, "AsExpected", "", now=now, generation=job.generation
        )
        after = after.model_copy(update={"conditions": conditions})
    look = soonest(
        TROUBLE_GRACE_SECONDS if pod.phase is PodPhase.PENDING else None,
        until_asked(after, pods, observed.warnings, now),
        until_lost(pods, job.spec.restart, now),
    )
    return Plan(after, ask(after, pods, observed.warnings, now), requeue_after=look, events=events)


def _after_failure(job: Job, observed: Observed, status: DDPJobStatus, pod: InitializerView, now: datetime) -> Plan:
    cause, final = _cause(pod)
    status = status.model_copy(update={"initializer_failures": pod.number + 1})
    if final or pod.number >= RETRIES:
        said = cause if final else f"{cause}; it was tried {pod.number + 1} times"
        status = _said(job, status, False, FAILED, said, now)
        code = pod.termination.exit_code if pod.termination else None
        failure = Failure(FAILED, said, Retry.NEVER, pod_name=pod.name, exit_code=code)
        status = status.model_copy(update={"last_failure": failure_status(status, failure, now)})
        return plan_failed(job, observed, status, FAILED, said, now)
    delay = backoff_seconds(job.spec.restart.backoff, pod.number, f"{job.uid}/init-{pod.number}")
    again = f"{cause}; trying again in {delay:.0f} s ({pod.number + 1} of {RETRIES} times)"
    after = _said(job, status, False, FAILED, again, now)
    return Plan(
        after.model_copy(update={"retry_at": now + timedelta(seconds=delay)}),
        (DeletePod(pod.name, pod.uid, _GRACE_SECONDS),),
        status_first=True,
        requeue_after=delay,
        events=(Event("Warning", FAILED, again.splitlines()[0]),),
    )


def _cause(pod: InitializerView) -> tuple[str, bool]:
    """What went wrong, for people, and whether another try would only do the same."""
    ended = pod.termination
    who = f"initializer {pod.step}" if pod.step else f"pod {pod.name}"
    if ended is None:
        return f"{who}: {pod.message or pod.reason or f'its node {pod.node_name} went away'}", False
    said = read_termination(ended.message)
    told = said.message if said else ""
    how = f"ended with exit code {ended.exit_code}" + (f" ({ended.reason})" if ended.reason else "")
    return f"{who}: {told or how}", ended.exit_code == EXIT_USER


def _said(job: Job, status: DDPJobStatus, holds: bool, reason: str, message: str, now: datetime) -> DDPJobStatus:
    conditions = cond.set_condition(
        status.conditions, cond.INITIALIZED, holds, reason, message, now=now, generation=job.generation, say_false=True
    )
    return status.model_copy(update={"conditions": conditions})


def _grace_left(pod: InitializerView, now: datetime) -> float:
    """Seconds in which the end of a pod that is being deleted may still be confirmed."""
    gone_by = pod.gone_by or now
    return SETTLE_SECONDS - (now - gone_by).total_seconds()


def _as_pod(pod: InitializerView, status: DDPJobStatus) -> PodView:
    return PodView(
        name=pod.name,
        uid=pod.uid,
        attempt=status.attempt,
        node_rank=None,
        phase=pod.phase,
        scheduled=pod.scheduled,
        node_name=pod.node_name,
        not_ready_since=pod.not_ready_since,
        reason=pod.reason,
        message=pod.message,
        exited=pod.exited,
    )
