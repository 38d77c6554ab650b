"""Suspension and the end of a job: when it gives its nodes back, when it has succeeded, and what is then left of it.

A job that is suspended stops as a whole, after a snapshot. That it stops is on record (condition Suspended is False,
for the reason Suspending) before any pod is told, so that how the pods end is never taken for a failure, not even by
an operator that was started meanwhile. Once all pods are gone the phase is Suspended. Resumed, it begins a new attempt,
which costs no budget: a new attempt is what keeps a pod that was thought dead from writing to the volume.
"""

from __future__ import annotations

from datetime import datetime

from ddpjob_operator.api.status import DDPJobStatus, NodeCount, Phase
from ddpjob_operator.core.failure.detect import SETTLE_SECONDS, last_report
from ddpjob_operator.core.gang.members import gang_size, stop
from ddpjob_operator.core.ledger.progress import with_final_report
from ddpjob_operator.core.stages.transitions import phase_conditions
from ddpjob_operator.core.values import conditions as cond
from ddpjob_operator.core.values.actions import DeletePod, Event, Plan
from ddpjob_operator.core.values.job import Job
from ddpjob_operator.core.values.observed import InitializerView, Observed, PodView

SUSPENDING = "Suspending"


def plan_suspension(job: Job, observed: Observed, status: DDPJobStatus, now: datetime) -> Plan | None:
    """What to do about a job that is suspended, or on its way there; None if it may run.

    A suspension that is taken back while pods still stop is carried through: they have been told, and hold the nodes.
    """
    if not job.spec.suspend and not is_suspending(status):
        return None
    left = tuple(pod for pod in observed.pods if not _given_up(pod, now))
    if left or _fetching(observed, now):
        return _suspending(job, observed, status, left, now)
    return _suspended(job, observed, status, now) if job.spec.suspend else None


def status_after_resume(job: Job, status: DDPJobStatus, now: datetime) -> DDPJobStatus | None:
    """The status of a job that may go on after a suspension; None if there was none.

    What has run before needs a new attempt; what has not is Pending, as any new job.
    """
    if job.spec.suspend or not (status.phase is Phase.SUSPENDED or is_suspending(status)):
        return None
    conditions = cond.set_condition(
        status.conditions, cond.SUSPENDED, False, "Resumed", "", now=now, generation=job.generation
    )
    update = {"conditions": conditions, "suspended_seconds": status.suspended_seconds + _suspended_for(status, now)}
    if status.spec_digests is None:
        update |= {"phase": Phase.PENDING, "attempt_time": now, "nodes": NodeCount()}
    return status.model_copy(update=update)


def is_suspending(status: DDPJobStatus) -> bool:
    """Whether the pods have been told to stop for a suspension, and are not known to be gone."""
    found = cond.find(status.conditions, cond.SUSPENDED)
    return found is not None and found.status == "False" and found.reason == SUSPENDING


def _suspending(job: Job, observed: Observed, status: DDPJobStatus, left: tuple[PodView, ...], now: datetime) -> Plan:
    actions = (*stop(observed.pods, everything=True, grace_seconds=None), *_stop_fetching(observed))
    if status.phase is Phase.SUSPENDED:
        return Plan(status, actions)  # a pod that was not seen before, or is nobody's
    after = with_final_report(status, last_report(pod for pod in left if pod.attempt == status.attempt), now)
    # a gang of which there is no record goes on with a new attempt
    unknown: dict[str, str] | None = {} if observed.pods else None
    after = after.model_copy(
        update={
            "spec_digests": unknown if status.spec_digests is None else status.spec_digests,
            "conditions": cond.set_condition(
                status.conditions,
                cond.SUSPENDED,
                False,
                SUSPENDING,
                "the pods are saving a snapshot and ending",
                now=now,
                generation=job.generation,
                say_false=True,
            ),
        }
    )
    told = Event("Normal", SUSPENDING, "all pods are asked to save a snapshot and end")
    fetching = (observed.initializer,) if observed.initializer is not None else ()
    waits = [wait for pod in (*left, *fetching) if (wait := _seconds_to_give_up(pod, now)) is not None]
    return Plan(
        after,
        actions,
        status_first=True,
        requeue_after=min((wait for wait in waits if wait > 0), default=None),
        events=() if is_suspending(status) else (told,),
    )


def _suspended(job: Job, observed: Observed, status: DDPJobStatus, now: datetime) -> Plan:
    if status.phase is Phase.SUSPENDED:
        return Plan(status)
    message = "stopped; set spec.suspend to false to resume"
    if status.snapshot is not None:
        message += f" from the snapshot of step {status.snapshot.step}"
    if observed.pods:
        stuck = ", ".join(f"{pod.name} on {pod.node_name}" for pod in observed.pods)
        message += f". These pods did not confirm their end, and may still run: {stuck}"
    total = gang_size(job, status)
    after = status.model_copy(
        update={
            "phase": Phase.SUSPENDED,
            "restart_at": None,
            "retry_at": None,
            "start_time": status.start_time or now,
            "observed_generation": job.generation,
            "nodes": NodeCount(ready=0, total=total),
            "conditions": phase_conditions(job, status, now, suspended=("Suspended", message)),
        }
    )
    return Plan(after, events=(Event("Normal", "Suspended", message),))


def _given_up(pod: PodView | InitializerView, now: datetime) -> bool:
    """Its grace is over and nobody has confirmed its end: its node is gone, and may never do so."""
    wait = _seconds_to_give_up(pod, now)
    return wait is not None and wait <= 0


def _seconds_to_give_up(pod: PodView | InitializerView, now: datetime) -> float | None:
    if not pod.deleting or pod.gone_by is None:
        return None
    return (pod.gone_by - now).total_seconds() + SETTLE_SECONDS


def _fetching(observed: Observed, now: datetime) -> bool:
    pod = observed.initializer
    return pod is not None and not pod.ended and not _given_up(pod, now)


def _stop_fetching(observed: Observed) -> tuple[DeletePod, ...]:
    pod = observed.initializer
    if pod is None or pod.deleting or pod.ended:
        return ()
    return (DeletePod(pod.name, pod.uid, None),)


def _suspended_for(status: DDPJobStatus, now: datetime) -> float:
    condition = cond.find(status.conditions, cond.SUSPENDED)
    if condition is None or condition.status != "True":
        return 0.0
    return max(0.0, round((now - condition.last_transition_time).total_seconds(), 3))
