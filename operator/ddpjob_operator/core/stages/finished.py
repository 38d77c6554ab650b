"""What is left of a job that is over: its pods by `cleanPodPolicy`, the job itself until its time to live is up."""

from __future__ import annotations

from datetime import datetime, timedelta

from ddpjob_operator.api.status import DDPJobStatus
from ddpjob_operator.core.failure.detect import has_succeeded
from ddpjob_operator.core.gang.members import RESTART_GRACE_SECONDS, gang_size, stop
from ddpjob_operator.core.stages import deadlines
from ddpjob_operator.core.values import conditions as cond
from ddpjob_operator.core.values.actions import Action, DeleteJob, DeletePod, Plan
from ddpjob_operator.core.values.job import Job
from ddpjob_operator.core.values.observed import Observed, PodView


def plan_finished(job: Job, observed: Observed, now: datetime) -> Plan:
    """What to do about a job that has Succeeded or Failed. Its status never changes again."""
    left = seconds_to_live(job, job.status, now)
    if left is not None and left <= 0:
        return Plan(job.status, (DeleteJob(job.uid),))
    actions: list[Action] = [*clean_up(job, job.status, observed.pods), *_initializer(job, observed)]
    return Plan(job.status, tuple(actions), requeue_after=left)


def clean_up(job: Job, status: DDPJobStatus, pods: tuple[PodView, ...]) -> tuple[DeletePod, ...]:
    """The pods of a job with this final status that go.

    A deadline stops what runs whatever the policy: that is what it is for. It leaves a pod the time to save a snapshot.
    Spares are stopped too, which wait for nothing any more.
    """
    late = _missed_a_deadline(status)
    if job.spec.clean_pod_policy == "None" and not late:
        return stop(tuple(pod for pod in pods if pod.node_rank is None))
    grace = None if late else RESTART_GRACE_SECONDS
    return stop(pods, everything=job.spec.clean_pod_policy == "All", grace_seconds=grace)


def seconds_to_live(job: Job, status: DDPJobStatus, now: datetime) -> float | None:
    """Seconds until a job that is over is to be deleted; None if it is to stay."""
    ttl, ended = job.spec.ttl_seconds_after_finished, status.completion_time
    if ttl is None or ended is None or not status.is_final:
        return None
    return (ended + timedelta(seconds=ttl) - now).total_seconds()


def _initializer(job: Job, observed: Observed) -> tuple[DeletePod, ...]:
    """The pod that fetched data: stopped if it still runs, removed with all others."""
    pod, policy = observed.initializer, job.spec.clean_pod_policy
    if pod is None or pod.deleting or policy == "None":
        return ()
    return () if pod.ended and policy == "Running" else (DeletePod(pod.name, pod.uid, RESTART_GRACE_SECONDS),)


def _missed_a_deadline(status: DDPJobStatus) -> bool:
    failed = cond.find(status.conditions, cond.FAILED)
    return failed is not None and failed.reason in deadlines.REASONS


def has_finished(job: Job, status: DDPJobStatus, pods: tuple[PodView, ...]) -> bool:
    """Whether the gang has done what `successPolicy` asks of it."""
    if job.spec.success_policy == "FirstNode":
        return any(pod.node_rank == 0 and has_succeeded(pod) for pod in pods)
    gang = [pod for pod in pods if pod.node_rank is not None]
    return len(gang) == gang_size(job, status) and all(has_succeeded(pod) for pod in gang)
