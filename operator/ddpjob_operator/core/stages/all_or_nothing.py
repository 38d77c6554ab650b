"""All or nothing: a gang that cannot be completed gives back what it holds, and tries again later.

Two gangs that each hold half of what there is would wait for each other for ever. So when the API server refuses a
pod of the gang (quota, admission), the others are deleted at once; and when some pods have nodes and the rest has
none for longer than `scheduling.timeoutSeconds`, all of them are. The next try is a new attempt, which costs nothing
and comes after a growing wait. That the job waits is on record since the first try, and so is its startup deadline.

Four things are not given back: what an elastic gang can go on with, the place in a queue of pods that hold no node
yet, and, when the API server refuses a pod, a gang whose last attempt is still going, or whose names another owner has:
what those hold is what is missing, and they let go of it by themselves.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from ddpjob_operator.api.status import DDPJobStatus, NodeCount, Phase
from ddpjob_operator.core.failure.budget import backoff_seconds, disrupted
from ddpjob_operator.core.gang.members import asking_since, gang_size, stop
from ddpjob_operator.core.gang.spec_changes import digests
from ddpjob_operator.core.stages.transitions import degraded
from ddpjob_operator.core.values.actions import Event, Plan
from ddpjob_operator.core.values.job import NAME_TAKEN, Defaults, Job, Problem
from ddpjob_operator.core.values.observed import Observed, PodView

LEAST_WAIT_SECONDS = 1.0


def plan_release(
    job: Job,
    observed: Observed,
    status: DDPJobStatus,
    pods: tuple[PodView, ...],
    now: datetime,
    defaults: Defaults,
) -> Plan | None:
    """Give back the gang if it cannot be completed; None while there is hope, or nothing to give back.

    `pods` are the members of the current attempt.
    """
    if status.phase not in (Phase.STARTING, Phase.RESTARTING):
        return None
    problem = _refused(job, observed, status, pods) or _not_in_time(job, status, pods, now)
    if problem is None:
        return None
    size, waits = gang_size(job, status), status.disruptions_since_progress
    delay = max(LEAST_WAIT_SECONDS, backoff_seconds(job.spec.restart.backoff, waits, f"{job.uid}/{status.attempt}"))
    said = f"{len(pods)} of {size} pods were released: {problem.message}"
    after = disrupted(degraded(job, status, problem.reason, f"{said}; trying again in {delay:.0f} s", now))
    after = after.model_copy(
        update={
            "attempt": status.attempt + 1,
            "retry_at": now + timedelta(seconds=delay),
            "nodes": NodeCount(ready=0, total=size),
            "kept_pods": {},
            "observed_generation": job.generation,
            "spec_digests": digests(job, defaults),
        }
    )
    return Plan(
        after,
        stop(observed.pods, everything=True),
        status_first=True,
        requeue_after=delay,
        events=(Event("Warning", "GangReleased", said.splitlines()[0]),),
    )


def until_given_back(job: Job, status: DDPJobStatus, now: datetime) -> float | None:
    """Seconds until an incomplete gang has waited for as long as it may."""
    limit, since = job.spec.scheduling.timeout_seconds, asking_since(status)
    if limit is None or since is None or status.phase not in (Phase.STARTING, Phase.RESTARTING):
        return None
    left = limit - (now - since).total_seconds()
    return left if left > 0 else None


def _refused(job: Job, observed: Observed, status: DDPJobStatus, pods: tuple[PodView, ...]) -> Problem | None:
    size = gang_size(job, status)
    old = any(pod.attempt != status.attempt or pod.deleting for pod in observed.pods)
    if (
        observed.problem is None
        or observed.problem.reason == NAME_TAKEN
        or not pods
        or len(pods) >= size
        or old
        or _is_enough(job, len(pods))
    ):
        return None
    return observed.problem


def _not_in_time(job: Job, status: DDPJobStatus, pods: tuple[PodView, ...], now: datetime) -> Problem | None:
    limit, since = job.spec.scheduling.timeout_seconds, asking_since(status)
    if limit is None or since is None or (now - since).total_seconds() < limit:
        return None
    placed, size = sum(pod.placed for pod in pods), gang_size(job, status)
    if placed in (0, size) or _is_enough(job, placed):
        return None
    waiting = next((pod for pod in pods if not pod.placed), None)
    why = f": pod {waiting.name}: {waiting.message}" if waiting is not None and waiting.message else ""
    return Problem("GangTimeout", f"after {limit} s {placed} of {size} pods had a node{why}")


def _is_enough(job: Job, nodes: int) -> bool:
    return job.spec.elastic is not None and nodes >= job.spec.elastic.min_nodes
