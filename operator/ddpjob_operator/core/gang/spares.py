"""Spares: pods without a node rank, ready to replace a failed pod or to let an elastic gang grow.

They are created only while the gang runs, so that they never take a node that it needs. One that runs when the next
attempt begins joins it, or remains a spare; one that does not is deleted, for the same reason. Where the ranks recover
live, a spare takes the place of a lost pod within the attempt (`gang.live`), and while a place is empty no other spare
is created, and one without a node goes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.core.failure.node_exclusion import barred
from ddpjob_operator.core.failure.node_lost import is_lost, patience
from ddpjob_operator.core.gang.children import create_service
from ddpjob_operator.core.gang.creation import until_creatable
from ddpjob_operator.core.gang.members import (
    can_be_kept,
    create_pod_action,
    current_group,
    discard,
    is_kept,
    members,
    needs_assignment,
)
from ddpjob_operator.core.manifests.admission import admission
from ddpjob_operator.core.manifests.admitted import Admitted, Refused
from ddpjob_operator.core.manifests.pod_environment import Place
from ddpjob_operator.core.manifests.spec_changes import made_otherwise
from ddpjob_operator.core.values.actions import Action, CreatePod
from ddpjob_operator.core.values.look import Look
from ddpjob_operator.core.values.names import spare_name
from ddpjob_operator.core.values.observed import PodPhase, PodView, ServiceView


def ready_spares(look: Look) -> tuple[PodView, ...]:
    """Spares that could join a gang at once."""
    spares = (pod for pod in look.observed.pods if pod.node_rank is None and 0 <= pod.attempt <= look.status.attempt)
    ready = (pod for pod in spares if pod.running and pod.ready and can_be_kept(pod))
    return tuple(pod for pod in ready if pod.node_name not in barred(look.status))


def idle_spares(look: Look) -> tuple[PodView, ...]:
    """Those of them that have not been given a place in the attempt that runs."""
    return tuple(pod for pod in ready_spares(look) if not needs_assignment(pod, look.status))


def free_spares(look: Look) -> tuple[PodView, ...]:
    """Spares that may be given a place in the attempt that runs, those that could join at once first: one that is about
    to start is ahead of a pod that is still to be created.
    """
    of_ranks = frozenset(look.names)
    spares = [pod for pod in _good(look) if can_be_kept(pod) and pod.name not in of_ranks]
    return tuple(sorted(spares, key=lambda pod: (not (pod.running and pod.ready), not pod.running, pod.name)))


def wanted(look: Look) -> int:
    """How many spares there should be."""
    return look.job.spec.spares + _growth(look)


def _growth(look: Look) -> int:
    """By how many nodes an elastic gang would grow."""
    spec = look.job.spec
    return max(0, spec.nodes - look.gang_size) if spec.elastic is not None else 0


def spare_actions(look: Look) -> tuple[Action, ...]:
    """Create and delete spares until there are as many as wanted. Those that run are kept first."""
    spares = (pod for pod in look.observed.pods if _is_spare(pod, look.status))
    staying = {pod.name for pod in _staying(look)}
    removed = discard(look, tuple(pod for pod in spares if pod.name not in staying))
    lacking = _lacking(look)
    if not lacking:
        return removed
    admitted = admission(look)
    if isinstance(admitted, Refused):
        return removed  # the job goes on as it was started; that its spec has changed is in the status
    if look.observed.service is None:
        return (*removed, create_service(look, admitted))
    return (*removed, *_created(look, admitted, look.observed.service, lacking))


def until_spared(look: Look) -> float | None:
    """Seconds until a spare that has vanished again and again may be created; None if none waits."""
    return min((wait for name in _lacking(look) if (wait := until_creatable(look, name)) > 0), default=None)


def _created(look: Look, admitted: Admitted, service: ServiceView, names: Sequence[str]) -> tuple[CreatePod, ...]:
    """No other name is taken instead of one that has to wait: it would be a way around the wait."""
    creatable = (name for name in names if until_creatable(look, name) <= 0)
    attempt, group = look.status.attempt, current_group(look)
    places = (Place(attempt, None, service, name, group=group) for name in creatable)
    return tuple(create_pod_action(look, admitted, place) for place in places)


def _lacking(look: Look) -> tuple[str, ...]:
    """Names of the spares to create."""
    settled = look.status.phase is Phase.RUNNING and not _has_empty_place(look)
    good = len(_good(look))
    short = max(0, wanted(look) - good) if settled else 0
    if short and made_otherwise(look.job, look.status, look.defaults):
        # no gang could keep it, neither the next one, nor this one once the edit is taken back: it would only show
        # whether an elastic gang can grow
        short = max(0, _growth(look) - good)
    if look.observed.problem is not None:
        short = min(short, 1)  # what was refused is tried with one pod
    # a name on record has a node rank, which a pod that is made now must not get
    taken = {pod.name for pod in look.observed.pods} | look.status.internal.kept_pods.keys()
    names = (spare_name(look.job.name, look.status.attempt, index) for index in itertools.count())
    return tuple(itertools.islice((name for name in names if name not in taken), short))


def _staying(look: Look) -> list[PodView]:
    good = _good(look)[: wanted(look)]
    return [pod for pod in good if can_be_kept(pod)] if _has_empty_place(look) else good


def _has_empty_place(look: Look) -> bool:
    """Whether a pod that was lost while the others train on is to be replaced by one that does not run yet."""
    lost = look.status.internal.lost_pods
    return bool(lost) and not {pod.node_rank for pod in members(look) if pod.running}.issuperset(lost.values())


def _good(look: Look) -> list[PodView]:
    """Spares that are of use, those that run first: one on a node that the job keeps away from will get no place."""
    spares = (pod for pod in look.observed.pods if _is_spare(pod, look.status))
    allowed, excluded = patience(look), barred(look.status)  # the first walks all pods
    usable = (pod for pod in spares if _is_usable(pod) and pod.node_name not in excluded)
    good = [pod for pod in usable if not is_lost(pod, allowed, look.now)]
    return sorted(good, key=lambda pod: (not pod.running, pod.name))


def _is_spare(pod: PodView, status: DDPJobStatus) -> bool:
    """Whether a pod is a spare of the current attempt; `left_over` has those of older ones."""
    is_current = pod.attempt == status.attempt or is_kept(pod, status)
    return pod.node_rank is None and is_current and not needs_assignment(pod, status)


def _is_usable(pod: PodView) -> bool:
    return (pod.running or pod.phase is PodPhase.PENDING) and not pod.deleting
