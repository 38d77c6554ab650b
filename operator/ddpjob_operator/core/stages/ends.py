"""Ends of pods are on record before the pods may vanish (decision 0012).

Each pod of a gang has a finalizer. A pod that is deleted (by a drain, an eviction, the pod garbage collector or a
person) stays visible until its finalizer is removed, even if the operator was away when it ended. A failure is on
record once the next attempt is, and a success once `internal.succeededNodes` names its node rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import replace

from ddpjob_operator.api.status import DDPJobStatus, Phase
from ddpjob_operator.core import transitions
from ddpjob_operator.core.failure.detect import has_succeeded, last_report
from ddpjob_operator.core.gang.members import members
from ddpjob_operator.core.ledger.progress import with_final_report
from ddpjob_operator.core.stages.suspend import is_suspending
from ddpjob_operator.core.values.actions import DeletePod, Plan, ReleasePod
from ddpjob_operator.core.values.look import Look
from ddpjob_operator.core.values.observed import PodPhase, PodView

_WITH_A_GANG = (Phase.STARTING, Phase.RESTARTING, Phase.RUNNING)


def with_ends(look: Look) -> Look:
    """The look with the success of each pod on record that is being deleted."""
    known = look.status.internal.succeeded_nodes
    ended = tuple(pod for pod in members(look) if pod.deleting and has_succeeded(pod) and pod.node_rank not in known)
    if look.status.phase not in _WITH_A_GANG or not ended:
        return look
    look = look.with_status(with_final_report(look.status, last_report(ended), look.now))
    return transitions.record_success(look, (pod.node_rank for pod in ended if pod.node_rank is not None))


def with_releases(look: Look, decided: Plan) -> Plan:
    """`decided`, and what it leaves of pods with nothing left to put on record released.

    A pod that the plan deletes is released with its deletion, or at a later look.
    """
    deleted = {action.uid for action in decided.actions if isinstance(action, DeletePod)}
    status = decided.status
    gang = members(look.with_status(status)) if status.phase in _WITH_A_GANG else ()
    have_a_say = frozenset(pod.uid for pod in gang)
    released = tuple(
        ReleasePod(pod.name, pod.uid)
        for pod in look.observed.pods
        if pod.held and pod.uid not in deleted and _is_on_record(status, pod, have_a_say)
    )
    if not released:
        return decided
    first = decided.status_first or decided.status != look.job.status
    return replace(decided, actions=(*decided.actions, *released), status_first=first)


def releases_of_deleted_job(pods: Iterable[PodView]) -> tuple[ReleasePod, ...]:
    """Nothing is put on record any more."""
    return tuple(ReleasePod(pod.name, pod.uid) for pod in pods if pod.held)


def _is_on_record(status: DDPJobStatus, pod: PodView, have_a_say: Set[str]) -> bool:
    """Whether how a pod ended, or will, changes no decision any more. Of a job that is not over only pods that are
    being deleted are asked for: any other may still take part in the next attempt.
    """
    if status.is_final:
        return True
    if not pod.deleting:
        return False
    if pod.uid not in have_a_say or pod.node_rank in status.internal.succeeded_nodes or _never_began(pod):
        return True
    return is_suspending(status) and pod.ended


def _never_began(pod: PodView) -> bool:
    """Whether there is no end to put on record: a pod that is created again costs no restart."""
    waited = pod.phase is PodPhase.PENDING or pod.failed_to_begin
    return waited and pod.termination is None and pod.init_failure is None
