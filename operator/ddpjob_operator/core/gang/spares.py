"""Pods beyond the gang that wait for a place in it: spares, and the nodes that an elastic gang may grow into.

They are made only while the gang runs, so that they never take a node that it needs. One that runs when the next
attempt begins takes part in it, or goes on waiting; one that does not is removed, for the same reason.
"""

from __future__ import annotations

import itertools
from datetime import datetime

from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.core.failure.node_lost import is_lost
from ddpjob_operator.core.gang.in_place import can_live_on
from ddpjob_operator.core.gang.members import creation, discard, gang_size, is_called, is_kept
from ddpjob_operator.core.manifests.pods import build_service
from ddpjob_operator.core.values.actions import Action, CreatePod, CreateService
from ddpjob_operator.core.values.job import Defaults, Job
from ddpjob_operator.core.values.names import spare_name
from ddpjob_operator.core.values.observed import Observed, PodPhase, PodView, ServiceView


def ready_waiting(observed: Observed) -> tuple[PodView, ...]:
    """Pods that wait and could start at once."""
    return tuple(
        pod for pod in observed.pods if pod.node_rank is None and pod.running and pod.ready and can_live_on(pod)
    )


def wanted(job: Job, status: DDPJobStatus) -> int:
    """How many pods should wait."""
    growth = job.spec.nodes - gang_size(job, status) if job.spec.elastic is not None else 0
    return job.spec.spares + max(0, growth)


def waiting_actions(
    job: Job, observed: Observed, status: DDPJobStatus, now: datetime, defaults: Defaults
) -> tuple[Action, ...]:
    """What makes the pods that wait as many as are wanted: those that run stay before those that do not."""
    waiting = [pod for pod in observed.pods if _waits(pod, status)]
    good = [pod for pod in waiting if _may_come(pod) and not is_lost(pod, job.spec.restart, now)]
    good.sort(key=lambda pod: (not pod.running, pod.name))
    count = wanted(job, status)
    staying = {pod.name for pod in good[:count]}
    removed = discard(job, tuple(pod for pod in waiting if pod.name not in staying), now)
    if status.phase is not Phase.RUNNING or len(good) >= count:
        return removed
    if observed.service is None:
        return (*removed, CreateService(build_service(job, status.attempt)))
    short = count - len(good)
    if observed.problem is not None:
        short = 1  # what was refused is tried with one pod
    return (*removed, *_created(job, observed, status, observed.service, short, defaults))


def _created(
    job: Job, observed: Observed, status: DDPJobStatus, service: ServiceView, count: int, defaults: Defaults
) -> tuple[CreatePod, ...]:
    taken = {pod.name for pod in observed.pods}
    names = (spare_name(job.name, status.attempt, index) for index in itertools.count())
    free = itertools.islice((name for name in names if name not in taken), count)
    return tuple(creation(job, status, name, None, service, defaults) for name in free)


def _waits(pod: PodView, status: DDPJobStatus) -> bool:
    """Whether a pod waits in the current attempt; what older attempts left over is seen to elsewhere."""
    return pod.node_rank is None and (
        pod.attempt == status.attempt or (is_kept(pod, status) and not is_called(pod, status))
    )


def _may_come(pod: PodView) -> bool:
    return (pod.running or pod.phase is PodPhase.PENDING) and not pod.deleting
