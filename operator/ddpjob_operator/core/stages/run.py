"""A gang without a failure: what it lacks is made, what older attempts left goes, and the status says how far it is."""

from __future__ import annotations

from datetime import datetime

from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.core.failure.node_lost import until_lost
from ddpjob_operator.core.gang.elastic import grace_of_old, still_saving, until_resized
from ddpjob_operator.core.gang.members import complete, counted, discard, gang_size, left_over, selector
from ddpjob_operator.core.gang.spares import ready_waiting, waiting_actions, wanted
from ddpjob_operator.core.gang.spec_changes import digests, edited_fields
from ddpjob_operator.core.gang.startup_problems import (
    ask,
    find_trouble,
    is_degraded,
    scheduled_condition,
    seconds_to_trouble,
    until_asked,
)
from ddpjob_operator.core.manifests.pods import build_service
from ddpjob_operator.core.stages.all_or_nothing import LEAST_WAIT_SECONDS, until_given_back
from ddpjob_operator.core.stages.transitions import degraded, phase_conditions
from ddpjob_operator.core.values import conditions as cond
from ddpjob_operator.core.values.actions import Action, CreateService, Event, Plan, soonest
from ddpjob_operator.core.values.job import Defaults, Job
from ddpjob_operator.core.values.observed import Observed, PodView


def keep_going(
    job: Job,
    observed: Observed,
    status: DDPJobStatus,
    pods: tuple[PodView, ...],
    now: datetime,
    defaults: Defaults,
) -> Plan:
    """No failure: make what is missing, remove what is left of older attempts, say how far the gang has come."""
    stale: tuple[Action, ...] = discard(job, left_over(observed, status), now, grace_seconds=grace_of_old(status))
    wait = _backoff_left(job, status, now) or still_saving(observed, status, now)
    if wait > 0 and not pods:
        return Plan(counted(job, status, pods, ready_waiting(observed)), stale, requeue_after=wait)
    if status.phase is not Phase.RUNNING and observed.service is None:
        # even if every pod is there: whether it selects this attempt has to be looked at
        return Plan(status, (*stale, CreateService(build_service(job, status.attempt))))

    create = complete(job, observed, status, pods, defaults) if status.phase is not Phase.RUNNING else ()
    waiting = waiting_actions(job, observed, status, now, defaults)
    status = counted(job, status, pods, ready_waiting(observed))
    after, events = _advanced(job, status, pods, now, defaults)
    after = _with_trouble(job, observed, after, pods, now)
    return Plan(
        after,
        (*stale, *create, *waiting, *ask(after, pods, observed.warnings, now)),
        # the digests of the spec must be on record before any pod is made from it, and that a gang is incomplete again
        # before what shows it is deleted
        status_first=status.phase in (None, Phase.PENDING) or status.phase is not job.status.phase,
        requeue_after=soonest(
            seconds_to_trouble(after, now) if after.phase is not Phase.RUNNING else None,
            until_asked(after, pods, observed.warnings, now),
            until_given_back(job, after, now),
            until_lost(observed.pods, job.spec.restart, now),
            until_resized(job, observed, after, now),
            # pods that wait are made once it is on record that the gang runs
            0.0 if after.phase is Phase.RUNNING is not status.phase and wanted(job, after) else None,
        ),
        events=events,
    )


def _backoff_left(job: Job, status: DDPJobStatus, now: datetime) -> float:
    """Seconds until the next attempt may start. More than any backoff means that the clock was set back."""
    left = [(time - now).total_seconds() for time in (status.restart_at, status.retry_at) if time is not None]
    most = max(job.spec.restart.backoff.max_seconds, LEAST_WAIT_SECONDS)
    return max((seconds for seconds in left if seconds <= most), default=0.0)


def _advanced(
    job: Job, status: DDPJobStatus, pods: tuple[PodView, ...], now: datetime, defaults: Defaults
) -> tuple[DDPJobStatus, tuple[Event, ...]]:
    """The phase that follows from the pods that are there, which have been counted."""
    if status.phase in (None, Phase.PENDING):
        status = status.model_copy(
            update={
                "phase": Phase.STARTING,
                "start_time": status.start_time or now,
                "attempt_time": now,
                "selector": selector(job),
                "observed_generation": job.generation,
                "spec_digests": digests(job, defaults),
            }
        )
        event = Event("Normal", "Starting", f"creating {job.spec.nodes} nodes")
        return status, (event,)
    if status.phase is not Phase.RUNNING and status.nodes.ready == status.nodes.total:
        message = f"all {len(pods)} nodes run, attempt {status.attempt}"
        status = status.model_copy(
            update={
                "phase": Phase.RUNNING,
                "restart_at": None,
                "retry_at": None,
                "conditions": phase_conditions(job, status, now, running=("GangRunning", message)),
            }
        )
        return status, (Event("Normal", "Running", message),)
    return status, ()


def _with_trouble(
    job: Job, observed: Observed, status: DDPJobStatus, pods: tuple[PodView, ...], now: datetime
) -> DDPJobStatus:
    status = status.model_copy(update={"observed_generation": job.generation})
    edited = edited_fields(job, status)
    if edited:
        names = ", ".join(f"spec.{name}" for name in edited)
        message = (
            f"{names} changed while the job runs; attempt {status.attempt} goes on as it was started, and a later "
            "attempt would use the new spec. Revert the edit, or delete the job and apply it again"
        )
        return degraded(job, status, "SpecChanged", message, now)
    if job.refused:
        return degraded(job, status, job.refused.reason, job.refused.message, now)
    trouble = find_trouble(status, pods, observed.problem, now, observed.warnings)
    if status.phase is not Phase.RUNNING:
        conditions = scheduled_condition(job, status, pods, gang_size(job, status), trouble, now)
        status = status.model_copy(update={"conditions": conditions})
    if trouble is not None and is_degraded(trouble):
        return degraded(job, status, trouble.reason, trouble.message, now)
    total = status.nodes.total
    if status.phase is Phase.RUNNING and job.spec.elastic is not None and total < job.spec.nodes:
        message = f"training goes on with {total} of {job.spec.nodes} nodes until more are available"
        return degraded(job, status, "FewerNodes", message, now)
    cleared = cond.set_condition(
        status.conditions, cond.DEGRADED, False, "AsExpected", "", now=now, generation=job.generation
    )
    return status.model_copy(update={"conditions": cleared})
