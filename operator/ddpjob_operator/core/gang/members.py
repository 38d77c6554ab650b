"""The gang as it is: which pods make it up, which are kept, left over or missing, and the actions that complete,
redirect or stop it.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from ddpjob_operator.api.status import DDPJobStatus, NodeCount, Phase
from ddpjob_operator.core import transitions
from ddpjob_operator.core.failure.detect import SETTLE_SECONDS, has_succeeded
from ddpjob_operator.core.failure.node_exclusion import NODES_KEPT, unwelcome
from ddpjob_operator.core.failure.node_lost import force_deletions, gone_nodes
from ddpjob_operator.core.gang.creation import until_creatable
from ddpjob_operator.core.gang.group import group_of, room
from ddpjob_operator.core.manifests.admitted import Admitted
from ddpjob_operator.core.manifests.bounds import counts_on_whole
from ddpjob_operator.core.manifests.placement import preferring_others
from ddpjob_operator.core.manifests.pod_environment import Place
from ddpjob_operator.core.manifests.pods import build_pod, rendezvous_selector
from ddpjob_operator.core.values import conditions as cond
from ddpjob_operator.core.values.actions import Action, AssignPod, CreatePod, DeletePod, PointService
from ddpjob_operator.core.values.changes import recorded
from ddpjob_operator.core.values.look import Look
from ddpjob_operator.core.values.names import pod_name, service_name
from ddpjob_operator.core.values.observed import PodPhase, PodView
from ddpjob_operator.core.values.trainer_report import attempt_of

RESTART_GRACE_SECONDS = 2

LEAST_WAIT_SECONDS = 1.0
"""How long a gang waits at least after it was given back, whatever the backoff."""

STAYS_SPARE = -1
"""In place of a node rank in `internal.keptPods`: the pod is kept and remains a spare."""


def members(look: Look) -> tuple[PodView, ...]:
    """The pods of the gang that have joined the current attempt: a kept pod that ended before it did not."""
    lost = look.status.internal.lost_pods
    return tuple(pod for pod in look.gang if not ended_before(pod, look.status) and pod.uid not in lost)


def done_and_gone(look: Look) -> frozenset[int]:
    """Node ranks of the current attempt that succeeded and have no pod any more."""
    succeeded = look.status.internal.succeeded_nodes
    return frozenset(succeeded) - {pod.node_rank for pod in members(look)} if succeeded else frozenset()


def is_incomplete(look: Look) -> bool:
    """Whether pods of the gang are still to be created, or assigned."""
    return len(members(look)) + len(done_and_gone(look)) < look.gang_size


def lacks_pods(look: Look) -> bool:
    """Whether pods of the gang are still to be created."""
    return len(members(look)) + len(done_and_gone(look)) + len(to_assign(look)) < look.gang_size


def missing(look: Look) -> list[tuple[str, int]]:
    """Names and node ranks of pods that were all there once, since the job is Running, and are gone."""
    status = look.status
    if status.phase is not Phase.RUNNING:
        return []
    present = {pod.node_rank for pod in look.gang} | done_and_gone(look) | set(status.internal.lost_pods.values())
    absent = [rank for rank in range(look.gang_size) if rank not in present]
    names = look.names if absent else ()
    return [(names[rank], rank) for rank in absent]


def left_over(look: Look) -> tuple[PodView, ...]:
    """Pods that are not part of the current attempt: those of older ones, and those that the status does not account
    for, whatever their labels say.
    """
    status, gang = look.status, {pod.uid for pod in look.gang}
    of_ranks = frozenset(look.names)

    def is_part(pod: PodView) -> bool:
        if pod.attempt != status.attempt:
            return is_kept(pod, status)
        if pod.uid in status.internal.lost_pods:
            return False
        if needs_assignment(pod, status):
            return True
        # a label can call a pod of the gang a spare: its name would never be free for the pod that is missing
        is_spare = pod.node_rank is None and pod.name not in of_ranks
        return not ended_before(pod, status) and (is_spare or pod.uid in gang)

    return tuple(pod for pod in look.observed.pods if not is_part(pod))


def ended_before(pod: PodView, status: DDPJobStatus) -> bool:
    """Whether a pod that was kept for the current attempt had ended before it joined it.

    Its end belongs to the attempt before, which has been counted. Only a kept pod can be such a one, and what takes
    its place is a new pod: a termination message that lies cannot make restarts free for ever.
    """
    if pod.termination is None or pod.name not in status.internal.kept_pods:
        return False
    attempt = attempt_of(pod.termination.message)
    if attempt is not None:
        return attempt < status.attempt
    ended, begun = pod.termination.finished_at, status.attempt_start_time
    return ended is not None and begun is not None and ended < begun


def can_be_kept(pod: PodView) -> bool:
    """Whether a pod may take part in the next attempt: it runs or is about to, and is not being deleted."""
    return not pod.deleting and (pod.running or (pod.phase is PodPhase.PENDING and pod.scheduled))


def is_kept(pod: PodView, status: DDPJobStatus) -> bool:
    """Whether a pod of an older attempt takes part in the current one."""
    return pod.name in status.internal.kept_pods and pod.attempt < status.attempt and can_be_kept(pod)


def still_holds(look: Look, pod: PodView) -> bool:
    """Whether a pod that is going may soon give back what is missing; one whose grace is over never may."""
    if not pod.deleting:
        return pod.attempt != look.status.attempt
    return pod.gone_by is None or look.seconds_until(pod.gone_by) + SETTLE_SECONDS > 0


def needs_assignment(pod: PodView, status: DDPJobStatus) -> bool:
    """Whether a kept pod has a node rank in the current attempt that its labels do not say yet."""
    node_rank = status.internal.kept_pods.get(pod.name, STAYS_SPARE)
    return node_rank != STAYS_SPARE and (is_kept(pod, status) or _is_promoted(pod, node_rank, status))


def to_assign(look: Look) -> tuple[PodView, ...]:
    """The kept pods that are part of the gang by the status alone: each of them has a node."""
    return tuple(pod for pod in look.observed.pods if needs_assignment(pod, look.status))


def about_to_be_assigned(look: Look) -> tuple[PodView, ...]:
    """Those of them that will be in a moment: not where the API server refuses that."""
    return () if look.observed.problem is not None else to_assign(look)


def _is_promoted(pod: PodView, node_rank: int, status: DDPJobStatus) -> bool:
    """Whether a spare of the current attempt has been given the place of a lost pod."""
    spare = pod.node_rank is None and pod.attempt == status.attempt and pod.uid not in status.internal.lost_pods
    return spare and node_rank in status.internal.lost_pods.values() and can_be_kept(pod)


def with_node_counts(look: Look, spares: int = 0) -> Look:
    """How many nodes are ready, and how many spares.

    The edge writes it along with the next change: alone it is not worth a write.
    """
    ready = sum(has_succeeded(pod) or (pod.running and not pod.deleting) for pod in members(look))
    ready += len(done_and_gone(look))
    count = NodeCount(ready=ready, total=look.gang_size, spares=spares)
    return look.with_status(recorded(look.status, nodes=count))


def ends_of_waits(look: Look, *moments: datetime | None) -> tuple[datetime, ...]:
    """Those of `moments`, which are `restartAt` and `retryAt`, that count. One that is further ahead than any backoff
    means that the clock was set back.
    """
    most = max(look.job.spec.restart.backoff.max_seconds, LEAST_WAIT_SECONDS)
    return tuple(moment for moment in moments if moment is not None and look.seconds_until(moment) <= most)


def starting_since(look: Look) -> datetime | None:
    """From when on the current attempt could have started: the wait before a restart is left out."""
    begun = look.status.attempt_start_time or look.status.start_time
    return begun and max((begun, *ends_of_waits(look, look.status.restart_at)))


def asking_since(look: Look) -> datetime | None:
    """When the attempt began to ask for nodes, or will."""
    begun, waits = look.status.attempt_start_time, ends_of_waits(look, look.status.restart_at, look.status.retry_at)
    return max(waits if begun is None else (begun, *waits), default=None)


def awaits_data(look: Look) -> bool:
    """Whether initializers have to put data on the volume before any pod of the gang is created."""
    status = look.status
    running = status.phase is Phase.RUNNING
    return bool(look.job.spec.initializers) and not running and not cond.holds(status.conditions, cond.INITIALIZED)


def current_group(look: Look) -> str:
    """The group that the current attempt is admitted in."""
    return group_of(look, (*members(look), *to_assign(look)))


def fill_gang(look: Look, admitted: Admitted) -> tuple[Action, ...]:
    """Complete the gang: assign the pods that are kept, create the others."""
    service, status = look.observed.service, look.status
    if service is None or awaits_data(look):
        return ()
    actions: list[Action] = []
    attempt, size = status.attempt, look.gang_size
    if service.attempt != attempt:
        actions.append(PointService(service_name(look.job.name), attempt, rendezvous_selector(look.job, attempt)))
    present = {pod.node_rank for pod in members(look)} | done_and_gone(look)
    kept = {status.internal.kept_pods[pod.name]: pod for pod in to_assign(look)}
    group = current_group(look)
    left = room(look, group)
    for node_rank in range(size):
        if node_rank in present:
            continue
        if (pod := kept.get(node_rank)) is not None:
            actions.append(AssignPod(pod.name, pod.uid, attempt, node_rank, size))
        elif left > 0 and not until_creatable(look, name := pod_name(look.job.name, attempt, node_rank)):
            left -= 1
            place = Place(attempt, node_rank, service, name, group=group)
            actions.append(create_pod_action(look, admitted, place))
    return tuple(actions)


def avoiding_gone_nodes(look: Look) -> Look:
    """The look with the nodes on record that seem to be gone, before pods are created that keep away from them."""
    if not is_incomplete(look):
        return look  # pods that wait already have no such term, and would gain nothing from being made anew
    known = look.status.internal.avoided_nodes
    gone = gone_nodes(look).difference(known, look.status.excluded_nodes)
    return transitions.avoid_nodes(look, (*known, *sorted(gone))[:NODES_KEPT]) if gone else look


def until_filled(look: Look) -> float | None:
    """Seconds until a pod that has vanished again and again may be created; None if none waits."""
    present, attempt = {pod.node_rank for pod in members(look)} | done_and_gone(look), look.status.attempt
    names = (pod_name(look.job.name, attempt, rank) for rank in range(look.gang_size) if rank not in present)
    return min((wait for name in names if (wait := until_creatable(look, name))), default=None)


def create_pod_action(look: Look, admitted: Admitted, place: Place) -> CreatePod:
    """Create a pod of the current attempt, which keeps away from the nodes that failed the job, and from those that
    seem to be gone; or prefers others, where an autoscaler adds no node for a pod that names nodes.
    """
    status, policy = look.status, look.job.spec.restart
    name = place.name or pod_name(look.job.name, place.attempt, place.node_rank or 0)
    # one that is created while the gang runs would have to do without such a node for good
    gone = status.internal.avoided_nodes if status.phase is not Phase.RUNNING else ()
    avoid, second_choice = tuple(dict.fromkeys((*status.excluded_nodes, *gone))), unwelcome(policy, status)
    if status.internal.node_names_refused:
        avoid, second_choice = (), tuple(dict.fromkeys((*avoid, *second_choice)))
    manifest = build_pod(admitted, replace(place, name=name, nodes=look.gang_size, avoid=avoid))
    manifest = preferring_others(manifest, second_choice)
    bounds = admitted.defaults.bounds
    whole = bool(bounds.resources) and counts_on_whole(manifest, bounds)
    return CreatePod(name, place.attempt, place.node_rank, manifest, whole)


def discard(
    look: Look, pods: tuple[PodView, ...], *, grace_seconds: int | None = RESTART_GRACE_SECONDS
) -> tuple[DeletePod, ...]:
    """Delete pods that the job is done with, whatever state they are in."""
    forced = force_deletions(pods, look.job.spec.restart, look.now)
    names = {action.name for action in forced}
    rest = tuple(pod for pod in pods if pod.name not in names)
    return (*forced, *stop(rest, everything=True, grace_seconds=grace_seconds))


def stop(
    pods: tuple[PodView, ...], *, everything: bool = False, grace_seconds: int | None = RESTART_GRACE_SECONDS
) -> tuple[DeletePod, ...]:
    """Delete what still runs; with `everything`, what has ended too. A grace of None is the pod's own."""
    return tuple(
        DeletePod(pod.name, pod.uid, grace_seconds)
        for pod in pods
        if not pod.deleting and (everything or not pod.ended)
    )
