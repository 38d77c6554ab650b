"""Spares: pods without a node rank, ready to replace a failed pod or to let an elastic gang grow.

They are created only while the gang runs, so that they never take a node that it needs. One that runs when the next
attempt begins joins it, or remains a spare; one that does not is deleted, for the same reason.
"""

from __future__ import annotations

import itertools

from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.core.failure.node_lost import is_lost
from ddpjob_operator.core.gang.members import can_be_kept, create_pod_action, discard, is_kept, needs_assignment
from ddpjob_operator.core.manifests.admission import admission
from ddpjob_operator.core.manifests.admitted import Admitted, Refused
from ddpjob_operator.core.manifests.pod_environment import Place
from ddpjob_operator.core.manifests.pods import build_service
from ddpjob_operator.core.values.actions import Action, CreatePod, CreateService
from ddpjob_operator.core.values.look import Look
from ddpjob_operator.core.values.names import spare_name
from ddpjob_operator.core.values.observed import PodPhase, PodView, ServiceView


def ready_spares(look: Look) -> tuple[PodView, ...]:
    """Spares that could join a gang at once."""
    spares = (pod for pod in look.observed.pods if pod.node_rank is None and 0 <= pod.attempt <= look.status.attempt)
    return tuple(pod for pod in spares if pod.running and pod.ready and can_be_kept(pod))


def wanted(look: Look) -> int:
    """How many spares there should be."""
    spec = look.job.spec
    growth = spec.nodes - look.gang_size if spec.elastic is not None else 0
    return spec.spares + max(0, growth)


def spare_actions(look: Look) -> tuple[Action, ...]:
    """Create and delete spares until there are as many as wanted. Those that run are kept first."""
    spares = [pod for pod in look.observed.pods if _is_spare(pod, look.status)]
    good = [pod for pod in spares if _is_usable(pod) and not is_lost(pod, look.job.spec.restart, look.now)]
    good.sort(key=lambda pod: (not pod.running, pod.name))
    count = wanted(look)
    staying = {pod.name for pod in good[:count]}
    removed = discard(look, tuple(pod for pod in spares if pod.name not in staying))
    if look.status.phase is not Phase.RUNNING or len(good) >= count:
        return removed
    admitted = admission(look)
    if isinstance(admitted, Refused):
        return removed  # the job goes on as it was started; that its spec has changed is in the status
    if look.observed.service is None:
        return (*removed, CreateService(build_service(admitted, look.status.attempt)))
    short = count - len(good)
    if look.observed.problem is not None:
        short = 1  # what was refused is tried with one pod
    return (*removed, *_created(look, admitted, look.observed.service, short))


def _created(look: Look, admitted: Admitted, service: ServiceView, count: int) -> tuple[CreatePod, ...]:
    taken, attempt = {pod.name for pod in look.observed.pods}, look.status.attempt
    names = (spare_name(look.job.name, attempt, index) for index in itertools.count())
    free = itertools.islice((name for name in names if name not in taken), count)
    return tuple(create_pod_action(look, admitted, Place(attempt, None, service, name)) for name in free)


def _is_spare(pod: PodView, status: DDPJobStatus) -> bool:
    """Whether a pod is a spare of the current attempt; `left_over` has those of older ones."""
    return pod.node_rank is None and (
        pod.attempt == status.attempt or (is_kept(pod, status) and not needs_assignment(pod, status))
    )


def _is_usable(pod: PodView) -> bool:
    return (pod.running or pod.phase is PodPhase.PENDING) and not pod.deleting
